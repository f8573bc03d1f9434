"""`dray submit --follow` and `dray status` over a requeue, on the real Slurm. This machine is no login node of it: its
commands are handed on to one, as the user whose runs these are."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

HAND_ON = f'exec {shlex.quote(sys.executable)} -m dray cluster exec -- "${{0##*/}}" "$@"\n'
OURS = '[ "$(id -u)" != 0 ] || chown -R "$(stat -c %u:%g "$SHARED/home")" "$SHARED/my runs"\n'


def until(happened: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_is_followed_over_its_requeue(cluster, root: Path, short, tmp_path: Path) -> None:
    """To its end, with exit code 0; in between its status says what it waits for, and what is saved."""
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "scancel", "scontrol", "sbatch"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{OURS if name == 'sbatch' else ''}{HAND_ON}")
        (tmp_path / "bin" / name).chmod(0o755)
    runs, user = cluster.shared / "my runs", (cluster.shared / "home").stat().st_uid
    code = f"import os; os.geteuid = lambda: {user}; import dray.cli; dray.cli.main()"
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SHARED": str(cluster.shared)}

    def status(job: str) -> dict[str, Any]:
        argv = [sys.executable, "-c", code, "status", job, "--json", "--runs", str(runs)]
        done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    argv = [sys.executable, "-c", code, "submit", "--follow", "--runs", str(runs), "recipes/smoke-cpu.toml"]
    argv += ["--nodes", "2", *short, "train.steps=200", "max_requeues=1"]
    shown = tmp_path / "shown"
    with shown.open("wb") as file, subprocess.Popen(argv, cwd=root, env=env, stdout=file, stderr=file) as follows:
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
            assert follows.wait(120) == 0, shown.read_text()
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
