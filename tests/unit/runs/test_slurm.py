"""Slurm's answers, also behind a site's wrapper that prints lines of its own, and the commands that dray gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dray.contract.findings import DrayError
from dray.runs import slurm
from dray.runs.slurm import Job
from slurms import Slurm as Fake


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, printed: str, code: int = 0) -> None:
    """A command of Slurm that prints this text."""
    folder.mkdir(exist_ok=True)
    (folder / "printed").write_text(printed)
    (folder / name).write_text(f"#!/bin/sh\ncat '{folder}/printed'\nexit {code}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("printed", "job", "cluster"),
    [
        ("42\n", 42, ""),
        ("42;lumi\n", 42, "lumi"),
        ("Submitted batch job 42\n", 42, ""),
        ("Welcome to harbour.\nYour project has 7 hours left\n42\nHave a nice day 8\n", 42, ""),
    ],
)
def test_the_number_of_a_submitted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, job: int, cluster: str
) -> None:
    tool(tmp_path / "bin", monkeypatch, "sbatch", printed)
    queued = slurm.sbatch(["sbatch", "--parsable", "x.sh"])
    assert (queued.job, queued.id, queued.cluster, queued.argv) == (
        job,
        "42",
        cluster,
        ["sbatch", "--parsable", "x.sh"],
    )


def test_no_number_of_a_submitted_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path / "bin", monkeypatch, "sbatch", "queued, thank you\n")
    with pytest.raises(DrayError, match="sbatch printed no job number"):
        slurm.sbatch(["sbatch"])


def test_jobs_of_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "Maintenance on Monday|see the web page",
        "13|12_1|RUNNING|1795496400|None|1795569960|/c/multinode.sh --run=/r/a b|c recipe.toml",
        "12|12_[3-9%2]|PENDING|1795496400|Priority|N/A|/c/multinode.sh\x1b[2J",
        "14|14|REQUEUE_HOLD|1795496400|launch failed requeued held|N/A|(null)",
    ]
    tool(tmp_path / "bin", monkeypatch, "squeue", "".join(f"{line}\n" for line in lines))
    running, waiting, held = slurm.jobs()
    command = "/c/multinode.sh --run=/r/a b|c recipe.toml"
    assert running == Job(13, "12_1", "RUNNING", 1795496400.0, "None", 1795569960.0, command)
    assert (waiting.waits, waiting.held, waiting.start, waiting.command) == (
        True, False, None, r"/c/multinode.sh\u001b[2J",
    )  # fmt: skip
    assert (held.waits, held.held, held.by_salloc) == (True, True, True)


@pytest.mark.parametrize(
    ("state", "waiting", "argv"),
    [
        ("RUNNING", False, "scancel 12_3"),
        ("PENDING", True, "scancel --state=PENDING 12_3"),
        # scancel compares the raw state, and such a job cannot start meanwhile.
        ("REQUEUE_HOLD", True, "scancel 12_3"),
        ("SPECIAL_EXIT", True, "scancel 12_3"),
    ],
)
def test_a_job_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, waiting: bool, argv: str
) -> None:
    fake = Fake(tmp_path, monkeypatch)
    slurm.cancel(Job(12, "12_3", state, 0.0, "", None, ""), waiting=waiting)
    assert fake.calls == [argv]


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ("JobId=7 JobState=COMPLETED Reason=None PreemptTime=None", "COMPLETED"),
        ("JobId=7 JobState=COMPLETING Reason=TimeLimit", "TIMEOUT"),
        ("JobId=7 JobState=COMPLETING Reason=None PreemptTime=2026-11-25T10:00:00", "PREEMPTED"),
        ("JobId=7 JobState=NODE_FAIL Reason=NodeDown PreemptTime=N/A", "NODE_FAIL"),
        ("slurm_load_jobs error: Invalid job id specified", ""),
    ],
)
def test_how_a_job_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, state: str) -> None:
    tool(tmp_path / "bin", monkeypatch, "scontrol", f"{shown}\n")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "harbour")
    assert slurm.end_state(slurm.show(7)) == state
    assert slurm.last_state(7, "harbour") == state  # without sacct
    assert slurm.last_state(7, "lumi") == ""
    tool(tmp_path / "bin", monkeypatch, "sacct", "CANCELLED by 1000\n")
    assert slurm.last_state(7, "lumi") == "CANCELLED by 1000"


def test_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "Welcome\ngpu*|4+|128|gpu:a100:4(S:0-1)\ncpu|2|64+|(null)\ngpu*|4+|128|gpu:a100:4(S:0-1)\nless|1\n"
    tool(tmp_path / "bin", monkeypatch, "sinfo", printed)
    assert [(one.name, one.nodes, one.cpus, one.gpus) for one in slurm.partitions()] == [
        ("gpu", 4, 128, 4), ("cpu", 2, 64, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("ask", [slurm.partitions, lambda: slurm.conf() or slurm.offered("account") or 1 / 0])
def test_a_controller_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask) -> None:
    monkeypatch.setattr(slurm, "_QUICK_S", 0.2)
    for name in ("sinfo", "scontrol", "sacctmgr"):
        tool(tmp_path / "bin", monkeypatch, name, "")
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises((DrayError, ZeroDivisionError)):
        ask()


def test_each_cluster_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, monkeypatch)
    fake.has(17, "PENDING", command="/c/multinode.sh --run=/r/mine x")
    queue = slurm.Slurm()
    found = [queue.job_of({"17": 2e9}, ()), queue.job_of({}, ("/r/mine",)), queue.job_of({"18": 2e9}, ("/r/other",))]
    assert [job and job.id for job in found] == ["17", "17", None]
    lines = (fake.folder / "calls").read_text().splitlines()
    assert lines == [f"squeue --array --noheader --user={os.geteuid()} --format=%A|%i|%T|%V|%r|%S|%o"]
