"""Two jobs of Slurm's on one checkpoint folder: the second is refused, and one that was killed goes on at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import until

pytestmark = pytest.mark.cluster
FOLDER = "/shared/home/one folder"


@pytest.mark.slow
def test_the_second_job_is_refused_and_after_a_kill_the_next_goes_on(cluster, sbatch, short) -> None:
    home = Path(cluster.shared, "home")
    lease, log = home / "one folder/lease.json", home / "first.log"
    cluster.exec(["rm", "-rf", FOLDER, "/shared/home/first.log"])
    words = (
        "--nodes=1", "slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, f"checkpoint.folder={FOLDER}",
        "checkpoint.every=5",
    )  # fmt: skip
    job = cluster.exec(["sbatch", "--parsable", f"--output=/shared/home/{log.name}", *words, "train.steps=100000"]).out
    until(lambda: list(lease.parent.glob("step-*[05]")), lambda: log.read_text() if log.exists() else job)
    second = sbatch(*words)
    assert second.code == 78
    assert "another run uses this checkpoint folder" in second.output
    assert f"job {job.strip()} of " in second.output
    # All of it at once, and the ranks release nothing.
    assert cluster.exec(["scancel", "--full", "--signal=KILL", job.strip()]).code == 0
    until(lambda: not cluster.exec(["squeue", "--noheader"]).out.strip(), log.read_text)
    kept = json.loads(lease.read_text())["job"] if lease.exists() else None
    assert kept in (int(job), None)
    newest = max(int(path.name[5:]) for path in lease.parent.glob("step-*") if path.name[5:].isdigit())
    third = sbatch(*words, f"train.steps={newest + 3}")
    assert third.code == 0, third.output
    assert third.result()["first_step"] == newest
    assert not lease.exists()
