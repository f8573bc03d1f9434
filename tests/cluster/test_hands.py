"""`dray stop` and `dray enter` on the real Slurm. This machine is no login node: its commands are handed on to one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import until

pytestmark = pytest.mark.cluster

TOOL = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m dray cluster exec -- "${{0##*/}}" "$@"\n'


@pytest.mark.slow
def test_a_command_in_it_then_a_stop_and_no_requeue(cluster, root: Path, short, tmp_path: Path) -> None:
    """max_requeues does not bring it back."""
    for name in ("squeue", "scancel", "scontrol", "srun"):
        (tmp_path / name).write_text(TOOL)
        (tmp_path / name).chmod(0o755)
    runs = cluster.shared / "runs"
    # As the user whose runs these are, who has no Docker on this machine.
    user = (cluster.shared / "home").stat().st_uid
    code = f"import os; os.geteuid = lambda: {user}; import dray.cli; dray.cli.main()"

    def dray(*words: str) -> tuple[int, str]:
        argv, env = [sys.executable, "-c", code, *words], {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(argv, cwd=root, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)  # noqa: PLW1510
        return done.returncode, done.stdout + done.stderr

    words = ["slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, "train.steps=5000", "max_requeues=3"]
    status, out, err = cluster.exec(["sbatch", "--parsable", "--output=/shared/home/hands.log", *words])
    assert status == 0, err
    job = out.strip()

    def metrics() -> list[Path]:
        found = runs.glob(f"*-smoke-cpu-{job}/attempt-1/metrics.jsonl")
        return [path for path in found if '"step"' in path.read_text()]

    until(metrics)
    attempt = metrics()[0].parent
    asks = 'echo "$(</proc/sys/kernel/hostname) $OMP_NUM_THREADS $PWD"'
    entered = dray("enter", job, "--runs", str(runs), "--node", "1", "--", "bash", "-c", asks)
    assert entered == (0, f"n2 1 /shared/runs/{attempt.parent.name}/attempt-1\n")
    status, out = dray("stop", job, "--runs", str(runs))
    assert status == 0, out
    assert "\nstopped by dray stop at " in out
    result = json.loads((attempt / "result.json").read_text())
    assert (result["status"], result["exit_code"], result["reason"], result["next"]) == (
        "stopped",
        75,
        "dray stop",
        None,
    )
    until(lambda: not cluster.exec(["squeue", "--noheader", "--user=dray"]).out.strip())
    assert not (attempt.parent / "attempt-2").exists()
    assert "has already ended\nstopped by dray stop at " in dray("stop", job, "--runs", str(runs))[1]
