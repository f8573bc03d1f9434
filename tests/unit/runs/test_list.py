"""`dray runs` says of each run what `dray status` says, also from a summary that is older than a change."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.facts import Facts
from dray.runs import status as statuses
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.slurm import Slurm as Known
from dray.runs.status import Stop, listed, status
from dray.runs.store import RunPaths
from helpers import ROOT
from slurms import Slurm

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", cluster="local"
)
LONG_AGO = time.time() - 3600
OTHER_USER = os.geteuid() + 1
STEP = '{"event": "step", "time": 2.0, "step": 7, "loss": 2.5}\n'
END = '{"event": "end", "time": 3.0, "tokens_per_s": 9.0, "train_seconds": 1.0}\n'
Change = Callable[[RunPaths, Slurm, pytest.MonkeyPatch], object]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    fake = Slurm(tmp_path, monkeypatch)
    cluster(fake, "local")
    return fake


def cluster(slurm: Slurm, name: str) -> None:
    (slurm.folder / "scontrol").write_text(f"ClusterName = {name}\nJobId=17 BatchFlag=1 Restarts=1\n")


def begun(runs: Path, facts: Facts = FACTS) -> RunPaths:
    """An attempt that has written nothing for an hour."""
    paths = write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["max_requeues=3"]), facts, runs=runs, run="mine")[1]
    paths.metrics.write_text(STEP)
    settle(paths)
    return paths


def settle(paths: RunPaths) -> None:
    for path in paths.folder.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))


def submitted(paths: RunPaths, *, job: int = 17, ago: float = 7200, **more: object) -> None:
    paths.run.mkdir(parents=True, exist_ok=True)
    at = time.time() - ago
    file = paths.run / "job.json"
    file.write_text(json.dumps({"job": job, "time": at, "argv": ["sbatch"], **more}))
    os.utime(file, (at, at))


def ended(paths: RunPaths, code: int, stopped: Stop | None = None, *, batch: bool = False) -> None:
    finish(paths, code=code, stopped=stopped, batch=batch)


def done(paths: RunPaths, *_: object) -> None:
    paths.metrics.write_text(STEP + END)
    ended(paths, 0)


def stopped(paths: RunPaths, slurm: Slurm, _patch: object) -> None:
    ended(paths, 75, Stop("the time limit", "2026-11-24T05:00:00Z"))
    slurm.has(17, "COMPLETING")


def requeued(paths: RunPaths, slurm: Slurm, _patch: object) -> None:
    ended(paths, 75, Stop("preemption", "2026-11-24T05:00:00Z"), batch=True)
    slurm.has(17, "PENDING")


def cancelled(paths: RunPaths, *_: object) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%S")
    (paths.run / "job-17.log").write_text(f"slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT {at} ***\n")


def again(paths: RunPaths, slurm: Slurm, _patch: object) -> None:
    submitted(paths, job=18, ago=60)
    slurm.has(18, "PENDING")


def planning(paths: RunPaths, slurm: Slurm, _patch: object) -> None:
    """A job of a plain sbatch that has made its folder, and has no plan yet."""
    paths.plan.unlink()
    (paths.run / "job.json").unlink()
    (slurm.folder / "scontrol").write_text("ClusterName = local\nJobId=17 BatchFlag=1 Restarts=0\n")
    slurm.has(17, "RUNNING")


def requeued_elsewhere(paths: RunPaths, slurm: Slurm, _patch: object) -> None:
    """By Slurm itself, on another cluster, an hour after the result."""
    submitted(paths, cluster="other")
    ended(paths, 75, Stop("preemption", "2026-11-24T05:00:00Z"))
    slurm.has(17, "PENDING", submitted=time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600)))
    for name in ("squeue", "scontrol"):
        (slurm.folder / "bin" / name).write_text(
            f'#!/bin/bash\n[[ "$*" == *--clusters=other* ]] && cat "{slurm.folder}/{name}"\n'
        )


def listed_again(paths: RunPaths, change: Callable[[], object]) -> None:
    """The change, over which the list's older summary is written: on a shared disk it may come late."""
    file = paths.run / "summary.json"
    summary, about = file.read_bytes(), file.stat()
    change()
    file.write_bytes(summary)
    os.utime(file, (about.st_atime, about.st_mtime))


def silent(_paths: RunPaths, slurm: Slurm, _patch: object) -> None:
    (slurm.folder / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")


def same(run: Path) -> str:
    """The state that both tell, in every field."""
    told, shown = status(run, Known()), listed(run, Known())
    assert shown.model_dump() == told.model_dump()
    return told.state


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda _paths, slurm, _: slurm.has(17, "RUNNING"), "running"),
        (lambda _paths, slurm, _: slurm.has(17, "PENDING"), "queued"),
        (lambda _paths, slurm, _: slurm.has(17, "REQUEUE_HOLD"), "queued"),
        (lambda _paths, slurm, _: slurm.has(17, "RUNNING", command="(null)"), "no result"),
        (done, "done"),
        (lambda paths, *_: ended(paths, 1), "failed"),
        (stopped, "stopped"),
        (requeued, "queued"),
        (lambda *_: None, "lost"),
        (cancelled, "stopped"),
        (again, "queued"),
        (lambda paths, *_: submitted(paths, job=18, ago=60), "lost"),
        (silent, "no result"),
        (planning, "running"),
        (requeued_elsewhere, "queued"),
        (lambda paths, *_: paths.plan.write_text("half of"), "lost"),
        (lambda paths, *_: paths.facts.unlink(), "lost"),
        (lambda paths, *_: paths.result.write_text("half of"), "no result"),
    ],
)  # fmt: skip
def test_a_list_says_what_status_says(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, change: Change, state: str
) -> None:
    paths = begun(tmp_path)
    submitted(paths)
    change(paths, slurm, monkeypatch)
    assert [same(paths.run), same(paths.run)] == [state, state]


@pytest.mark.parametrize(
    ("job", "stopped", "state"),
    [("PENDING", None, "queued"), ("RUNNING", None, "running"), ("", None, "lost"), ("", 1.0, "stopped")],
)
def test_so_it_does_of_a_run_without_an_attempt(
    tmp_path: Path, slurm: Slurm, job: str, stopped: float | None, state: str
) -> None:
    paths = RunPaths(tmp_path / "mine")
    submitted(paths, stopped=stopped)
    if job:
        slurm.has(17, job)
    assert [same(paths.run), same(paths.run)] == [state, state]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda *_: None, "lost"),
        (lambda _paths, slurm, _: slurm.has(17, "PENDING"), "queued"),
        (lambda _paths, slurm, _: slurm.has(17, "REQUEUE_HOLD"), "queued"),
        (lambda _paths, slurm, _: slurm.has(17, "RUNNING"), "running"),
        (lambda paths, slurm, _: slurm.has(18, "PENDING", command=f"x --run={paths.run} y"), "queued"),
        (again, "queued"),
        (lambda paths, *_: ended(paths, 1), "failed"),
        (lambda paths, *_: listed_again(paths, lambda: ended(paths, 1)), "failed"),
        (lambda paths, *_: listed_again(paths, lambda: begun(paths.run.parent, FACTS.model_copy(update={"job": 0}))),
         "no result"),
        (lambda paths, *_: listed_again(paths, lambda: ended(begun(paths.run.parent), 1)), "failed"),
        (cancelled, "stopped"),
        (lambda paths, *_: listed_again(paths, lambda: cancelled(paths)), "stopped"),
        (silent, "no result"),
        (lambda _paths, _slurm, patch: patch.setenv("PATH", "/nowhere"), "no result"),
        (lambda _paths, slurm, _: cluster(slurm, "elsewhere"), "no result"),
        (lambda _paths, _slurm, patch: patch.setattr(os, "geteuid", lambda: OTHER_USER), "no result"),
        (lambda paths, *_: (paths.run / "summary.json").write_text("[7]"), "lost"),
    ],
)  # fmt: skip
def test_a_killed_run_may_come_back(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, change: Change, state: str
) -> None:
    """By a requeue, or with a late result; and another user or machine may not know that it was killed."""
    paths = begun(tmp_path)
    submitted(paths)
    assert (same(paths.run), (paths.run / "summary.json").exists()) == ("lost", True)
    change(paths, slurm, monkeypatch)
    assert [same(paths.run), same(paths.run)] == [state, state]


def test_a_summary_that_comes_late_does_not_hide_the_next_attempt(tmp_path: Path, slurm: Slurm) -> None:
    paths = begun(tmp_path)
    done(paths)
    listed_again(paths, lambda: begun(tmp_path, FACTS.model_copy(update={"job": 0})))
    assert same(paths.run) == "no result"


def test_a_killed_run_is_read_whole_once(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = begun(tmp_path)
    submitted(paths)
    os.utime(paths.run, (LONG_AGO, LONG_AGO))
    seen = listed(paths.run, Known())
    assert paths.run.stat().st_mtime == pytest.approx(LONG_AGO)  # for `dray clean --older-than`
    monkeypatch.delattr(statuses, "status")
    assert listed(paths.run, Known()).model_dump() == seen.model_dump()
    moved = paths.run.rename(tmp_path / "moved")
    assert (listed(moved, Known()).run, listed(moved, Known()).folder) == ("moved", str(moved))


@pytest.mark.parametrize(
    "change",
    [
        lambda paths: paths.node_log(0).write_text("it lived a minute ago\n"),
        lambda paths: (paths.checkpoints / "lease.json").write_text("{}"),
        lambda paths: (paths.run / "job-17.log").write_text("its script ended a minute ago\n"),
        lambda paths: paths.stop.write_text("TERM\n"),
        lambda paths: paths.plan.unlink(),
        lambda paths: paths.plan.write_text("half of"),
        lambda paths: paths.facts.write_text(paths.facts.read_text().replace("job=17", "job=0")),
        lambda paths: (paths.run / f"summary.json.part-{os.getpid()}").mkdir(),  # as on a read-only disk
        lambda paths: submitted(paths, cluster="other"),
    ],
)  # fmt: skip
def test_what_may_change_or_cannot_be_written_is_read_whole_again(
    tmp_path: Path, slurm: Slurm, change: Callable[[RunPaths], object]
) -> None:
    paths = begun(tmp_path)
    change(paths)
    assert same(paths.run) == same(paths.run)
    assert not (paths.run / "summary.json").exists()
