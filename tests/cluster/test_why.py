"""Why a job failed, by the batch script's last lines and by `dray why`, of a real Slurm and a real image."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import until

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
    assert f"\n  cause: {NAME}\n" in page


@pytest.mark.slow
def test_a_cancelled_run_that_left_no_result(sbatch, login, cluster) -> None:
    """Slurm takes the image away before the batch script can write one, as the program takes no notice of SIGTERM."""
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(90)"
    runs = cluster.shared / "runs"
    before = set(runs.iterdir())
    words = ("launcher=python", "ranks_per_node=1", "preflight.when=never", "--", "python3", "-c", code)

    def is_up() -> bool:
        logs = [run / "attempt-1" / "logs" / "rank-0.log" for run in set(runs.iterdir()) - before]
        return any("up" in log.read_text() for log in logs if log.exists())

    with ThreadPoolExecutor() as pool:
        job = pool.submit(sbatch, "slurm/multinode.sh", *words)
        until(is_up)
        assert cluster.exec(["scancel", "--user=dray"]).code == 0
        ended = job.result()
    assert ended.folder is not None, ended.output
    _, page, _ = login.dray("why", f"/shared/runs/{ended.folder.name}")
    assert page.startswith(f"{ended.folder.name}, attempt 1: stopped by scancel at ")
    assert "\n  cause: cancelled\n  fix: " in page
