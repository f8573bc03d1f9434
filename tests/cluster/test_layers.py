"""A layer by the real Apptainer: the same bytes twice, and a job of two nodes that uses what is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wheels
from dray.images.sif import record
from dray.images.sif.verify import digest

NAME = "test-barge"
PROGRAM = """
import barge, os, subprocess, sys, transformers
barge.main()
print(subprocess.run(["barge"], capture_output=True, text=True, check=True).stdout, end="")
print("path", sys.path[-1], "bytecode", os.path.exists(barge.__cached__))
"""


def layer(root: Path, folder: Path, *words: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dray", "image", "layer", "cpu", "--name", NAME, "--wheels", str(folder), *words]
    env = {**os.environ, "UV_OFFLINE": "1"}
    return subprocess.run(argv, cwd=root, env=env, umask=umask, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def barge(root: Path, sif: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The layer's file. `sif` is what it is made for."""
    folder = tmp_path_factory.mktemp("my wheels")
    wheels.make(folder, "1.0", "transformers>=5")
    file = sif.with_name(f"dray-cpu-{NAME}.sif")
    for path in (file, record.path_for(file), file.with_suffix(".lock")):
        path.unlink(missing_ok=True)
    done = layer(root, folder, "--pip", "barge")
    assert done.returncode == 0, done.stderr
    assert f"\n  barge 1.0\n{file}  " in "\n" + done.stdout
    first = digest(file)
    again = layer(root, folder, "--lock", str(file.with_suffix(".lock")), umask=0o077)
    assert again.returncode == 0, again.stderr
    assert digest(file) == first
    refused = layer(root, folder, "--pip", "transformers")
    assert (refused.returncode, digest(file)) == (78, first)
    assert "the image has all of these packages already" in refused.stderr
    # The lock of that is there now; the layer's own comes back.
    assert layer(root, folder, "--pip", "barge").returncode == 0
    assert digest(file) == first
    yield file
    for path in (file, record.path_for(file), file.with_suffix(".lock")):
        path.unlink(missing_ok=True)


@pytest.mark.cluster
def test_a_job_uses_it(sbatch, cluster, root: Path, barge: Path) -> None:
    """Its module, its console script, its bytecode; after the image's own packages."""
    folder = cluster.shared / "home" / "my layer"
    folder.mkdir(exist_ok=True)
    (folder / "use.py").write_text(PROGRAM)
    options = ("preflight.when=never", "ranks_per_node=1", "launcher=python", f"layer={NAME}")
    words = (f"{root}/slurm/multinode.sh", *options, "--", "use.py")
    ended = sbatch(*words, workdir="/shared/home/my layer")
    assert ended.code == 0, ended.output
    cached = "/opt/layer/lib/barge/__pycache__/__init__.cpython-311.pyc"
    line = f"barge 1.0 /opt/layer/lib/barge/__init__.py {cached}"
    for rank in range(2):
        shown = (ended.attempt / "logs" / f"rank-{rank}.log").read_text()
        assert f"{line}\n{line}\npath /opt/layer/lib bytecode True\n" in shown
    plan = json.loads((ended.attempt / "plan.json").read_text())
    assert plan["layer"] == {
        "file": plan["layer"]["file"], "digest": digest(barge), "variant": "cpu", "packages": {"barge": "1.0"},
        "changed": [],
    }  # fmt: skip
    assert plan["layer"]["file"].endswith(f"/build/{barge.name}")
