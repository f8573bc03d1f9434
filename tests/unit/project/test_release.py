"""A wheel that is installed gives a working checkout, and building it twice gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from helpers import PYTHON, ROOT

pytestmark = pytest.mark.slow

EPOCH = {"SOURCE_DATE_EPOCH": "1750000000"}


def run(*argv: object, cwd: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {**PYTHON, "HOME": str(cwd), **env}
    done = subprocess.run([str(one) for one in argv], cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def build(source: Path, folder: Path, **env: str) -> Path:
    argv = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    run(*argv, cwd=source, **EPOCH, **env)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def dray(wheel, tmp_path_factory) -> Path:
    """`dray` of the wheel, beside the packages that these tests run with."""
    venv = tmp_path_factory.mktemp("my venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv)
    python = venv / "bin" / "python"
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--ignore-installed", "--no-warn-script-location", wheel, cwd=venv)
    return venv / "bin" / "dray"


@pytest.fixture(scope="module")
def checkout(dray, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "my checkout"
    run(dray, "init", folder, cwd=folder.parent)
    return folder


@pytest.mark.seconds
def test_a_checkout_plans_a_recipe(dray: Path, checkout: Path) -> None:
    assert run(dray, "recipe", "check", "recipes/smoke-cpu.toml", cwd=checkout).stdout.startswith("recipes/smoke-cpu")
    planned = run(dray, "plan", "recipes/smoke-cpu.toml", cwd=checkout).stdout
    assert "smoke-cpu" in planned
    assert str(ROOT) not in planned
    for script in ("multinode.sh", "singlenode.sh", "probe.sh"):
        assert os.access(checkout / "slurm" / script, os.X_OK) == os.access(ROOT / "slurm" / script, os.X_OK)
    # Without Slurm's variables a batch script says what is missing: it has found its library beside it.
    assert "SLURM_JOB_ID" in run("bash", "slurm/multinode.sh", "recipes/smoke-cpu.toml", cwd=checkout, code=78).stderr


@pytest.mark.seconds
def test_recipes_and_sites_are_found_anywhere(dray: Path, tmp_path: Path) -> None:
    assert "smoke-cpu" in run(dray, "recipe", "list", cwd=tmp_path).stdout
    assert "lumi" in run(dray, "site", "list", cwd=tmp_path).stdout


def test_images_are_not_built_in_the_package(dray: Path, tmp_path: Path) -> None:
    refused = run(dray, "image", "build", "cpu", cwd=tmp_path, code=78).stderr
    assert "no dray checkout found" in refused
    assert "dray init FOLDER" in refused


def test_a_checkout_builds_the_same_wheels(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    """So an image from `pip install dray` has the digest of one from a clone."""
    (checkout / "recipes" / "mine.toml").unlink()  # the user's own
    assert build(checkout, tmp_path / "all").read_bytes() == wheel.read_bytes()
    ours = build(ROOT, tmp_path / "ours", DRAY_WHEEL="image")
    assert build(checkout, tmp_path / "theirs", DRAY_WHEEL="image").read_bytes() == ours.read_bytes()
    assert not [name for name in zipfile.ZipFile(ours).namelist() if name.startswith("dray/checkout/")]


@pytest.mark.seconds
@pytest.mark.parametrize("taken", ["folder", "file"])
def test_init_keeps_what_is_there(taken: str, dray: Path, tmp_path: Path) -> None:
    target = tmp_path / "taken"
    (target if taken == "file" else tmp_path / "taken" / "file").parent.mkdir(exist_ok=True)
    (target if taken == "file" else target / "file").write_text("kept")
    refused = run(dray, "init", target, cwd=tmp_path, code=78).stderr
    assert refused.startswith(
        "dray: the folder is not empty" if taken == "folder" else "dray: a file has the name of the new folder"
    )


def test_a_clone_gives_a_checkout_too(tmp_path: Path) -> None:
    run(sys.executable, "-m", "dray", "init", "new", cwd=tmp_path)
    assert (tmp_path / "new" / "containers" / "steps" / "run.sh").is_file()
    assert (tmp_path / "new" / "src" / "dray" / "cli" / "recipe.py").is_file()
