"""A job on the real cluster, and the run folder that it leaves."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its exit code, what it printed, and its run folder on this machine."""

    code: int
    output: str
    folder: Path | None

    def result(self) -> dict[str, Any]:
        assert self.folder is not None, self.output
        return json.loads((self.folder / "result.json").read_text())

    def metrics(self, event: str) -> list[dict[str, Any]]:
        assert self.folder is not None, self.output
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [seen for line in lines if (seen := json.loads(line))["event"] == event]


# `sbatch --wait` looks after 2, 10 and 42 seconds; most jobs here end in between.
WAIT = """
job=$(sbatch --parsable "$@") || exit
unfinished="JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)"
while state=$(scontrol show job --oneliner "$job") && [[ $state =~ $unfinished ]]; do
  ((SECONDS < 300)) || { echo "$state" >&2; exit 124; }
  sleep 0.2
done
[[ $state =~ ExitCode=([0-9]+): ]]
exit "${BASH_REMATCH[1]}"
"""


@pytest.fixture(scope="session")
def sbatch(desk):
    """Submit and wait, as the cluster's ordinary user; `words` are what follows sbatch."""

    def submit(*words: str, workdir: str | None = None, env: dict[str, str] | None = None) -> Ended:
        log = desk.shared / "home" / "job.log"
        log.unlink(missing_ok=True)
        given = ["bash", "-c", WAIT, "sbatch", "--output=/shared/home/job.log", *words]
        code, out, err = desk.exec(given, workdir=workdir, env=env)
        output = log.read_text() if log.exists() else out + err
        found = re.search(r"^run folder: /shared/(.*)$", output, re.MULTILINE)
        return Ended(code, output, desk.shared / found[1] if found else None)

    return submit


# This machine is no login node of the cluster: the command is handed on to one, and the folder belongs to the user
# there, as it does where one user submits and runs.
SBATCH = f"""#!/bin/bash
[ "$(id -u)" != 0 ] || chown -R "$(stat -c %u:%g "$SHARED/home")" "$SHARED/my runs"
exec {shlex.quote(sys.executable)} -m dray cluster exec -- sbatch "$@"
"""


@pytest.fixture(scope="session")
def submit(desk, root: Path, tmp_path_factory: pytest.TempPathFactory):
    """By `dray submit`: the job once it has ended, and its number."""
    tool = tmp_path_factory.mktemp("bin") / "sbatch"
    tool.write_text(SBATCH)
    tool.chmod(0o755)

    def submitted(*words: str | Path, cwd: Path | None = None) -> tuple[Ended, str]:
        ended = subprocess.run(
            [sys.executable, "-m", "dray", "submit", "--runs", desk.shared / "my runs", *words],
            cwd=cwd or root,
            env={**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "SHARED": str(desk.shared)},
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
        return Ended(0, (folder / f"job-{job}.log").read_text(), folder), job

    return submitted


@pytest.fixture(scope="session")
def full_run(sbatch) -> Ended:
    """The smoke recipe as the README submits it, on both nodes."""
    return sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml")
