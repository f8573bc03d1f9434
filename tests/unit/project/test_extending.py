"""Every block of docs/extending.md is applied to a copy of the checkout, and the tests that it shows are run there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import PYTHON, ROOT

BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
TESTS = [body.partition("\n")[0].removeprefix("# ") for _, body in BLOCKS if body.startswith("# tests/")]
TRAIN = [name for name in TESTS if any(word in name for word in ("objective", "tracker"))]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy with all additions at once: none may be in another's way."""
    folder = tmp_path_factory.mktemp("a copy") / "dray"
    for name in ("src", "containers", "recipes", "slurm", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for kind, body in BLOCKS:
        if kind == "diff":
            apply(folder, body)
        elif kind == "bash":
            subprocess.run(["bash", "-euo", "pipefail", "-c", body], cwd=folder, check=True)
        elif kind != "text":
            path = folder / body.partition("\n")[0].removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(body, encoding="utf-8")
    return folder


def apply(folder: Path, diff: str) -> None:
    """As patch would, but by the lines alone, which must be in the file exactly once: the page gives no numbers."""
    head, *hunks = re.split(r"^@@\n", diff, flags=re.MULTILINE)
    path = folder / head.split()[-1].removeprefix("b/")
    text = path.read_text(encoding="utf-8")
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        assert text.count(old) == 1, f"{path}: {old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def run(checkout: Path, *argv: str) -> None:
    env = {**PYTHON, "HOME": str(checkout), "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run([sys.executable, *argv], cwd=checkout, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_adds_one_of_each() -> None:
    added = ("site", "launcher", "engine", "objective", "tracker", "variant")
    assert len(TESTS) == len(added)


@pytest.mark.seconds
def test_additions(checkout: Path) -> None:
    run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(name for name in TESTS if name not in TRAIN))


@pytest.mark.seconds
@pytest.mark.torch
def test_additions_that_train(checkout: Path) -> None:
    run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TRAIN)


@pytest.mark.slow
@pytest.mark.seconds
def test_the_house_still_stands(checkout: Path) -> None:
    """Also with the additions, each file is in its place, and each site's values have their sources."""
    names = (
        "project/test_architecture.py",
        "planning/test_train_rooms.py",
        "config/test_sites.py::test_each_value_says_why_and_from_where",
        "launchers/test_launchers.py::test_a_recipe_may_name_every_launcher",
        "launchers/test_launchers.py::TestCommands::test_recipes_that_do_not_fit",
    )
    tests = [f"tests/unit/{name}" for name in names]
    run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


def test_an_addition_takes_two_files_and_a_test(checkout: Path) -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for section in sections:
        touched = set(re.findall(r"^(?:\+\+\+ b/|# )((?:src|slurm|containers)/\S+)$", section, re.MULTILINE))
        assert 1 <= len(touched) <= 2, (section.partition("\n")[0], touched)
