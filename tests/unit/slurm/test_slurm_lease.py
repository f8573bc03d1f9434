"""slurm/job.sh asks Slurm for the ranks: is the job that has the folder of the checkpoints gone?"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from helpers import ROOT

TOKEN = "0123456789abcdef" * 2
GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
SCRIPT = """
set -euo pipefail
source "$DRAY_HOME/slurm/job.sh"
attempt="$1" checkpoints="$2"
job::lease
"""


def asked(
    folder: Path, squeue: str, *, checkpoints: str = "", own: str = "17", cluster: str = "lumi", lease: str = "",
    theirs: bool = False,
) -> str:  # fmt: skip
    """What the ranks are told."""
    first, attempt = folder / "my runs/first", folder / "my runs/second/attempt-3"
    for made in (folder / "bin", first / "attempt-2", attempt, attempt.parent / "checkpoints"):
        made.mkdir(parents=True)
    (first / "attempt-2/facts.txt").write_text("scheduler=slurm\ncluster=lumi\njob=16\n")
    holder = {"token": TOKEN, "node": "n1", "job": 16, "run": str(first), "attempt": 2, "since": "",
              "process": []}  # fmt: skip
    if theirs:
        os.chown(first / "attempt-2/facts.txt", 65534, -1)
    (Path(checkpoints or attempt.parent / "checkpoints") / "lease.json").write_text(lease or json.dumps(holder))
    tool = folder / "bin/squeue"
    words = "--array --noheader --format=%A --jobs=16"
    tool.write_text(f'#!/bin/bash\n[[ -z "${{SQUEUE_STATES:-}}" && "$*" == "{words}" ]] || exit 64\n{squeue}\n')
    tool.chmod(0o755)
    env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "DRAY_HOME": str(ROOT), "SLURM_JOB_ID": own,
           "SQUEUE_STATES": "PENDING"}  # fmt: skip
    argv = ["bash", "-c", SCRIPT, "job", str(attempt), checkpoints]
    done = subprocess.run(argv, env=env | {"SLURM_CLUSTER_NAME": cluster}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    told = attempt / "ended"
    return told.read_text() if told.exists() else ""


@pytest.mark.parametrize("squeue", [GONE, "true", "echo 160; echo 17; echo 161"])
def test_it_is_gone(tmp_path: Path, squeue: str) -> None:
    assert asked(tmp_path, squeue) == f"{TOKEN}\n"


def test_in_a_folder_of_the_recipe_s(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    assert asked(tmp_path, GONE, checkpoints=str(own)) == f"{TOKEN}\n"


@pytest.mark.parametrize(
    ("squeue", "changed"),
    [
        ("echo 16", {}),  # also COMPLETING: its processes may be alive
        ("echo 15; echo 16; echo 17", {}),  # the last task of an array that has its number
        ("echo 'CLUSTER: lumi'; echo 15", {}),  # nothing that is known here
        ("echo 'Unable to contact slurm controller' >&2; exit 1", {}),
        (GONE, {"own": "16"}),  # this job, requeued
        (GONE, {"cluster": "another"}),
        (GONE, {"lease": '{"token": "../../etc", "job": 16'}),
        (GONE, {"lease": "["}),
    ],
)
def test_it_may_be_there(tmp_path: Path, squeue: str, changed: dict[str, str]) -> None:
    assert asked(tmp_path, squeue, **changed) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_job_of_another_user_may_be_hidden(tmp_path: Path) -> None:
    assert asked(tmp_path, GONE, theirs=True) == ""
