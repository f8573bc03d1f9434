"""requeue = "expedite": what sbatch is given, and how a job that Slurm expedites ends; with a stand-in for scontrol."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dray.config import sites
from dray.runs import submit
from dray.runs.prepare import read_recipe
from dray.runs.store import RunPaths
from helpers import ROOT

ALLOWED = "cloud_dns,enable_expedited_requeue"
SCONTROL = """#!/bin/bash
if [[ "$1 $2" == "show job" ]]; then
  echo "JobId=17 JobName=mine
   JobState=$STATE Reason=None Dependency=(null)
   Requeue=1 Restarts=$RESTARTS BatchFlag=1 Reboot=0 ExitCode=0:0
   SpreadJob=Yes $FLAGS"
else
  echo "$*" >>calls
fi
"""


@pytest.mark.parametrize(
    ("version", "parameters", "takes"),
    [
        ("25.11.0", ALLOWED, True),
        ("26.05.4", "enable_expedited_requeue", True),
        ("24.11.5", ALLOWED, False),
        ("25.05.3", "", False),
        ("", "", False),
        ("26.05.4", "(null)", False),
    ],
)
@pytest.mark.parametrize("key", ["expedite", "normal"])
def test_sbatch_is_given_the_option_where_slurm_takes_it(
    tmp_path: Path, key: str, version: str, parameters: str, takes: bool
) -> None:
    config = {"SLURM_VERSION": version, "SlurmctldParameters": parameters}
    known = submit.Known(config, sites.Choice(sites.find(sites.GENERIC), "test"))
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", [f"requeue={key}"])
    job = submit.planned(recipe, RunPaths(tmp_path / "r"), submit.Submission(["smoke-cpu"]), known)
    assert ("--requeue=expedite" in job.argv) == (key == "expedite" and takes)
    (note,) = [finding for finding in job.plan.findings if "expedite" in finding.problem] or [None]
    assert (note is not None) == (key == "expedite" and not takes)
    if note:
        assert note.problem == "this Slurm does not support requeue = expedite; a requeued job waits two minutes"
        assert note.wanted == "Slurm 25.11 or later, with SlurmctldParameters=enable_expedited_requeue"
        assert note.found == f"Slurm {version}, SlurmctldParameters={parameters}"


def ended(folder: Path, do: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A batch script that does this, and what Slurm is told."""
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    (folder / "calls").touch()
    known = {
        "PATH": f"{folder}:{os.environ['PATH']}", "DRAY_HOME": str(ROOT), "SLURM_JOB_ID": "17", "ENVIRONMENT": "BATCH",
        "STATE": "RUNNING", "RESTARTS": "0", "FLAGS": "ExpeditedRequeue=Yes", **env,
    }  # fmt: skip
    script = f'set -euo pipefail; source "$DRAY_HOME/slurm/job.sh"; {do}'
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=known, capture_output=True, text=True, check=False, timeout=60
    )
    return done, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("flags", "when"),
    [
        ("ExpeditedRequeue=Yes", "as soon as its nodes are free (--requeue=expedite)"),
        ("", "in two minutes at the earliest (BeginTime)"),
    ],
)
def test_when_a_requeued_job_starts(tmp_path: Path, flags: str, when: str) -> None:
    done, calls = ended(tmp_path, "end::requeue", FLAGS=flags)
    assert (calls, done.stderr) == (["requeue 17"], "")
    assert done.stdout == f"requeued: job 17 goes on in this run folder; Slurm starts it {when}\n"


@pytest.mark.parametrize("do", ["exit 78", 'job::die 78 "no"', '( exit 78 ); echo "not reached"'])
def test_a_job_that_fails_is_not_held_in_the_queue(tmp_path: Path, do: str) -> None:
    """Slurm 26.05 would put it back for its exit code, and hold it (REQUEUE_HOLD)."""
    done, calls = ended(tmp_path, do)
    assert (done.returncode, done.stdout, calls) == (78, "", ["update job=17 Requeue=0"])


@pytest.mark.parametrize(
    ("do", "env"),
    [
        ("exit 0", {}),
        ("exit 78", {"FLAGS": ""}),
        ("exit 78", {"ENVIRONMENT": "INTERACTIVE"}),
        ("exit 75", {"STATE": "PENDING"}),
        ("exit 75", {"STATE": "COMPLETING", "RESTARTS": "1"}),
        ("exit 75", {"STATE": "COMPLETING", "RESTARTS": "3", "SLURM_RESTART_COUNT": "2"}),
    ],
)
def test_slurm_is_told_nothing_else(tmp_path: Path, do: str, env: dict[str, str]) -> None:
    """Of a job that ended well, that is not expedited, is no batch job, or is back in the queue already."""
    assert ended(tmp_path, do, **env)[1] == []


def test_a_task_of_an_array(tmp_path: Path) -> None:
    _, calls = ended(tmp_path, "exit 1", SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")
    assert calls == ["update job=12_3 Requeue=0"]
