"""What a verb prints of a run: each line once, nothing that moves a cursor, and how the run is at that moment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from command import dray
from dray.cli.runs import status_line, waiting_lines
from dray.facts import Facts
from dray.runs.finish import finish
from dray.runs.metrics import parsed
from dray.runs.prepare import read_recipe, write
from dray.runs.slurm import Job
from dray.runs.status import State, Stop, Watched
from dray.runs.store import RunPaths
from helpers import ROOT
from slurms import Slurm

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n1", nodes=1, engine="apptainer", image="/i.sif", home="/h", cluster="local"
)


def begun(runs: Path) -> RunPaths:
    """The next attempt of `mine`."""
    return write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ()), FACTS, runs=runs, run="mine")[1]


def aged(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.hostile("streams")
def test_no_error_sends_an_escape_sequence_to_the_terminal(tmp_path: Path) -> None:
    """A folder's name, or a plan's text, may be a stranger's."""
    ended = dray("status", tmp_path / "\x1b]0;x\x07")
    assert "\x1b" not in ended.stdout + ended.stderr
    assert r"\u001b]0;x\u0007" in ended.stdout + ended.stderr


def test_slurm_has_no_reason_yet() -> None:
    told = Job(5, "5", "PENDING", 0.0, "None", None, "x.sh")
    lines = waiting_lines(State(run="r", folder="/r", state="queued", waiting=told))
    assert lines[0] == "  Slurm: job 5 PENDING, Slurm gives no reason yet"


@pytest.mark.hostile("files")
@pytest.mark.parametrize(
    ("line", "loss"),
    [
        (b'{"loss": 5.123456789012345678}', 5.123456789012345678),
        (b'{"loss": 4.9e-324}', 4.9e-324),
        (b'{"loss": 0.1, "x": "\xe9"}', None),
        (b'{"loss": ' + b"9" * 5000 + b"}", None),
        (b"[" * 100_000, None),
        (b'{"loss": 1', None),
    ],
)
def test_a_line_of_metrics_to_the_last_bit_or_not_at_all(line: bytes, loss: float | None) -> None:
    assert (parsed(line) or {}).get("loss") == loss


def test_nobody_watches_an_unknown_run_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, seen = Watched(tmp_path), State(run="r", folder="/r", state="no result")
    assert not watched.over(seen)
    monkeypatch.setattr(Watched, "unknown_s", -1.0)
    assert watched.over(seen)
    assert not watched.over(seen.model_copy(update={"state": "running"}))


def test_an_attempt_that_began_after_slurm_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is asked four times a minute, and a head line is printed each second."""
    slurm, first = Slurm(tmp_path, monkeypatch), begun(tmp_path)
    (slurm.folder / "scontrol").write_text("ClusterName = local\n")
    aged(first.plan, 60)
    finish(first, code=75, stopped=Stop("the time limit", "2026-11-24T05:00:00Z"), batch=True)
    aged(first.result, 30)
    slurm.has(17, "PENDING")
    watched = Watched(first.run)
    assert watched.look().state == "queued"
    second = begun(tmp_path)
    assert status_line(watched.look()) == "mine: running (smoke-cpu, attempt 2, job 17, 2 ranks on n1)"
    aged(second.plan, -3600)  # its clock is an hour before this one's: Slurm's answer counts
    assert watched.look().state == "queued"
    aged(second.plan, 60)
    assert watched.look().state == "queued"
    slurm.has(18, "RUNNING")
    watched = Watched(first.run)
    assert watched.look().state == "lost"
    begun(tmp_path)
    assert watched.look().state == "running"
