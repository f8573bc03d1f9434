"""drain = "leave": the batch script asks whether Slurm drains a node; a stand-in for sinfo, and short minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from helpers import ROOT
from jobs import SRUN, Job

SINFO = """#!/bin/bash
echo "$*" >>"{folder}/calls"
mapfile -t calls <"{folder}/calls"
((${{#calls[@]}} < {silent})) || printf '%s\\n' {lines}
"""
ASKED = "--all --Node --noheader --nodes=n[1-3] --states=drain --format=%N %E"


def looked(folder: Path, *lines: str, lost: str = "") -> tuple[str, str, list[str]]:
    """What a batch script hears and prints, and what sinfo is asked, which prints these lines the third time."""
    quoted = " ".join(f"'{line}'" for line in lines)
    sinfo = SINFO.format(folder=folder, silent=3, lines=quoted)
    for name, text in (("sinfo", sinfo), ("sleep", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    script = f"""set -euo pipefail; source "$DRAY_HOME/slurm/job.sh"; lost=({lost})
        trap 'echo USR1' USR1; job::drained & wait $! || wait $! || true"""
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "DRAY_HOME": str(ROOT), "SLURM_JOB_NODELIST": "n[1-3]"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout, done.stderr, (folder / "calls").read_text().splitlines()


@pytest.mark.seconds
def test_a_node_that_is_drained(tmp_path: Path) -> None:
    """Once, though it is of two partitions."""
    out, err, calls = looked(tmp_path, "n2       a bad GPU, see $(id)", "n2       a bad GPU, see $(id)")
    assert (out, calls) == ("USR1\n", [ASKED] * 3)
    assert err == ("dray: Slurm drains n2 (a bad GPU, see $(id)): the run is asked to save and leave (drain = leave)\n")


@pytest.mark.seconds
def test_a_node_that_the_run_has_lost_is_not_left_again(tmp_path: Path) -> None:
    _, err, _ = looked(tmp_path, "n2 gone", "n3 a fan", lost="n2 n1")
    assert err == "dray: Slurm drains n3 (a fan): the run is asked to save and leave (drain = leave)\n"


@pytest.mark.seconds
@pytest.mark.parametrize("drain", ["leave", "stay"])
def test_a_run_saves_and_leaves(tmp_path: Path, drain: str) -> None:
    """By the real batch script, runner and rank; with `stay`, the default, Slurm is not even asked."""
    job = Job(tmp_path)
    job.tool("srun", SRUN)
    job.tool("sinfo", SINFO.format(folder=tmp_path, silent=1, lines="'n1 a test'"))
    job.tool("sleep", "#!/bin/sh\nexec /bin/sleep 0.02\n")
    job.tool("scontrol", f'#!/bin/sh\necho "$*" >>"{tmp_path}/scontrol"\necho "JobState=RUNNING BatchFlag=1"\n')
    program = f"trap 'exit 75' USR1; for _ in {{1..{100 if drain == 'leave' else 20}}}; do /bin/sleep 0.1; done"
    words = [*(["drain=leave"] if drain == "leave" else []), "max_requeues=1", "launcher=python"]
    script = subprocess.Popen(
        [job.home / "slurm" / "singlenode.sh", *words, "--", "bash", "-c", program],
        env={**job.env, "ENVIRONMENT": "BATCH"}, cwd=job.home, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = script.communicate(timeout=60)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
    (attempt,) = job.runs.glob("*/attempt-1")
    result = json.loads((attempt / "result.json").read_text())
    if drain == "stay":
        assert (script.returncode, result["status"], (tmp_path / "calls").exists()) == (0, "done", False), err
        return
    assert (script.returncode, result["status"], result["reason"]) == (75, "stopped", "SIGUSR1"), err
    assert "dray: Slurm drains n1 (a test): the run is asked to save and leave (drain = leave)\n" in err
    assert "requeued: job 17 goes on in this run folder" in out
    assert "requeue 17" in (tmp_path / "scontrol").read_text().splitlines()
