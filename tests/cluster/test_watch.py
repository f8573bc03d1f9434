"""`dray submit --follow` and `dray status` over a requeue, on the real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers import until

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_a_run_is_followed_over_its_requeue(cluster, login, short, tmp_path: Path) -> None:
    """To its end, with exit code 0; in between its status says what it waits for, and what is saved."""

    def status(job: str) -> dict[str, Any]:
        code, out, err = login.dray("status", job, "--json")
        assert code == 0, err
        return json.loads(out)

    argv = [*login.argv, "submit", "--follow", "recipes/smoke-cpu.toml"]
    argv += ["--nodes", "2", *short, "train.steps=200", "max_requeues=1"]
    shown = tmp_path / "shown"
    with shown.open("wb") as file, subprocess.Popen(argv, stdout=file, stderr=file) as follows:
        try:
            until(lambda: b"is in the queue" in shown.read_bytes() or follows.poll() is not None)
            queued = re.search(r"job (\d+) is in the queue", shown.read_text())
            assert queued, shown.read_text()
            job = queued[1]
            until(lambda: re.search(r"^step \d+ ", shown.read_text(), re.MULTILINE))
            seen = status(job)
            assert (seen["state"], seen["attempt"], seen["nodes"]) == ("running", 1, ["n1", "n2"])
            assert cluster.exec(["scancel", "--batch", "--signal=USR1", job]).code == 0
            until(lambda: "PENDING, BeginTime" in shown.read_text())  # it asks Slurm each 15 s
            waits = status(job)
            assert (waits["state"], waits["attempts"], waits["waiting"]["reason"]) == ("queued", 1, "BeginTime")
            # Slurm would wait two minutes; in its first second a node takes the job for the one that has just ended.
            assert cluster.exec(["scontrol", "update", f"job={job}", "StartTime=now+4"]).code == 0
            assert follows.wait(300) == 0, shown.read_text()
        finally:
            follows.kill()
            cluster.exec(["scancel", "--user=dray"])
    ended, text = status(job), shown.read_text()
    assert (ended["state"], ended["step"], ended["attempts"]) == ("done", 200, 2)
    places = [
        re.search(pattern, text, re.MULTILINE)
        for pattern in (
            r": running \(smoke-cpu, attempt 1, ", rf": queued \(smoke-cpu, attempt 1, job {job}, ",
            rf"^  Slurm: job {job} PENDING, BeginTime: ", r": running \(smoke-cpu, attempt 2, ", "^resumed at step ",
            "^step 200 ", "^done: 200 steps, ",
        )
    ]  # fmt: skip
    assert all(places), text
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts), text
    assert "\nTraceback" not in text
