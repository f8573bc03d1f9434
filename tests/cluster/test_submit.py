"""`dray submit` to the real Slurm: the run folder is there before the job is, and the job fills it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

# This machine is no login node of the cluster: the command is handed on to one, and the folder belongs to the user
# there, as it does where one user submits and runs.
SHORT = ("train.steps=4", "train.warmup_steps=0", "preflight.when=never")
SBATCH = f"""#!/bin/bash
[ "$(id -u)" != 0 ] || chown -R "$(stat -c %u:%g "$SHARED/home")" "$SHARED/my runs"
exec {shlex.quote(sys.executable)} -m dray cluster exec -- sbatch "$@"
"""


def submitted(desk, root: Path, tmp_path: Path, *words: str | Path, cwd: Path | None = None) -> tuple[Path, str]:
    """The run's folder once the job has ended, and the job's number."""
    tool = tmp_path / "sbatch"
    tool.write_text(SBATCH)
    tool.chmod(0o755)
    ended = subprocess.run(
        [sys.executable, "-m", "dray", "submit", "--runs", desk.shared / "my runs", *words],
        cwd=cwd or root,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SHARED": str(desk.shared)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    queued, where = ended.stdout.splitlines()
    folder = Path(where.removeprefix("run folder: "))
    job = queued.removeprefix("job ").removesuffix(" is in the queue")
    deadline = time.monotonic() + 120
    while not (folder / "result.json").exists():
        assert time.monotonic() < deadline, [path.read_text() for path in folder.glob("job-*.log")]
        time.sleep(0.2)
    return folder, job


def test_a_submitted_recipe_trains_in_its_folder(desk, root: Path, tmp_path: Path) -> None:
    words = ["--nodes", "2", "--sbatch=--export=NONE", *SHORT]
    folder, job = submitted(desk, root, tmp_path, "recipes/smoke-cpu.toml", *words)
    result = json.loads((folder / "result.json").read_text())
    assert (result["run"], result["status"], result["hosts"]) == (folder.name, "done", ["n1", "n2"])
    assert f"run folder: {folder}\n" in (folder / f"job-{job}.log").read_text()
    assert json.loads((folder / "plan.json").read_text())["run"] == folder.name


def test_a_submitted_command_is_every_rank(desk, root: Path, tmp_path: Path) -> None:
    asks = "from accelerate import Accelerator; print('of', Accelerator().num_processes)"
    words = [
        "--launcher",
        "accelerate",
        "nodes=2",
        "ranks_per_node=2",
        "preflight.when=never",
        "--",
        "python3",
        "-c",
        asks,
    ]
    folder, _ = submitted(desk, root, tmp_path, *words)
    logs = {path.name: path.read_text() for path in (folder / "logs").glob("rank-*.log")}
    assert logs == {f"rank-{rank}.log": "of 4\n" for rank in range(4)}
    assert json.loads((folder / "result.json").read_text())["status"] == "done"
