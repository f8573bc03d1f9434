"""cotainr builds an image of a conda file, and dray adopts it; Miniforge, Conda and the indexes are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import miniforge
from dray.clients import apptainer, builder, builder_container, docker
from dray.images import adopt, inputs
from dray.images.sif import format as sif_format
from helpers import in_builder

pytestmark = [pytest.mark.docker, pytest.mark.sif]

NAME = "cotainr-by-a-test"
# The base of `--system`: the CPU image's Debian with Python, and pip beside it; what dray has put there is gone.
BUILD = """
set -e
unsquashfs -no-progress -no-xattrs -quiet -offset "$1" -dest /tmp/base -excludes /tmp/cpu.sif \\
  opt/dray .singularity.d environment singularity .exec .run .shell .test >/dev/null
cp -r /tmp/work/packages/* /tmp/base/usr/lib/python3/dist-packages/
cd /tmp/work
exec python3 miniforge.py /tmp/work/hosts \\
  python3 -m cotainr build x.sif --system=here --conda-env=environment.yml --accept-licenses --no-color
"""


def package(name: str) -> Path:
    """The folder of its modules."""
    return Path(pytest.importorskip(name, reason=f"{name} is not installed (make .venv/cotainr)").__file__).parent


@pytest.fixture
def built(root: Path, tmp_path: Path) -> Path:
    """x.sif, by cotainr in the builder's container as an ordinary user, who has no network."""
    work = tmp_path / "work"
    for name, folder in (("pip", "packages"), ("yaml", "packages"), ("cotainr", "site")):
        shutil.copytree(package(name), work / folder / name)
    (work / "site" / "systems.json").write_text(json.dumps({"here": {"base-image": "/tmp/base"}}))
    shutil.copy(miniforge.__file__, work)
    shutil.copy(root / "containers" / "cpu" / "environment.yml", work)
    indexes = {one.name: one.index.removeprefix("https://") for one in inputs.image(root, "cpu").vendor}
    miniforge.lay_out(work / "hosts", root / "build" / "wheels", "/tmp/wheels", indexes)
    os.chown(work, *builder_container.caller())
    sif = sif_format.read(root / "build" / "dray-cpu.sif")
    seen = {work: "/tmp/work", root / "build" / "wheels": "/tmp/wheels", sif.path: "/tmp/cpu.sif"}
    with closing(docker.client()) as client:
        tools = builder.image(client, root, on_line=print)
    done = in_builder(
        tools,
        *("sh", "-c", BUILD, "sh", str(sif.system.offset)),
        volumes=[f"{path}:{target}{'' if path == work else ':ro'}" for path, target in seen.items()],
        env=["PYTHONPATH=/tmp/work/site", "PIP_NO_CACHE_DIR=1",
             "APPTAINER_MKSQUASHFS_ARGS=-comp zstd -Xcompression-level 1"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return work / "x.sif"


@pytest.fixture
def adopted(root: Path, built: Path) -> Iterator[adopt.Adopted]:
    image = adopt.adopt(root, str(built), name=NAME, force=True)
    yield image
    shutil.rmtree(image.file.parent)


@pytest.mark.slow
def test_it_is_adopted_and_trains(adopted, root: Path) -> None:
    """Each package came by its hash, torch from the vendor's index, and dray's trainer lacks none."""
    assert (adopted.variant, adopted.brought, adopted.lacks) == ("cpu", (), ())
    torch = {vendor.name: vendor.version for vendor in inputs.image(root, "cpu").vendor}["torch"]
    assert adopted.versions["torch"] == torch
    environment = [f"PYTHONPATH={adopted.file.parent}:{root / 'src'}", f"DRAY_HOME={root}"]
    recipe = [str(root / "recipes" / "smoke-cpu.toml"), "train.steps=5", "train.warmup_steps=0", "nodes=1"]
    done = apptainer.execute(
        adopted.file,
        ["env", *environment, "python3", "-m", "dray", "run", *recipe, "--engine", "bare", "--runs", "/tmp/runs"],
        options=["--contain", f'--mount=type=bind,"src={root}","dst={root}",ro'],
        binds={root: False},
        seconds=600,
    )
    assert done.code == 0, done.err
    assert "\nsmoke-cpu: 2 ranks on 1 node (bare)\n" in done.out
    assert "\ndone: 5 steps, loss 5.555 -> 4.25" in done.out
