"""Why a job failed, by the batch script's last lines and by `dray why`, of a real Slurm and a real image."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster
NAME = "a Python import failed"


def test_a_job_is_told_why_it_failed(sbatch) -> None:
    code = "import os, time\nif os.environ['RANK'] == '1': import no_such_module\ntime.sleep(60)"
    ended = sbatch("slurm/multinode.sh", "launcher=python", "ranks_per_node=1", "--", "python3", "-c", code)
    assert ended.code == 1, ended.output
    cause = ended.result()["cause"]
    assert (cause["rank"], cause["name"]) == (1, NAME)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in cause["last_lines"]
    assert f"\n  cause: {NAME}\n  fix: " in ended.output
    names = [line.partition(":")[0] for line in cause["evidence"]]
    assert names[:2] == ["disk of the run folder", "/dev/shm"]
    argv = [sys.executable, "-m", "dray", "why", str(ended.folder)]
    page = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert page.splitlines()[1].startswith("first to fail: rank 1 on n2: exit code 1")
    assert f"\ncause: {NAME}\n" in page
