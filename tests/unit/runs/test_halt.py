"""`dray stop`: whom it asks, what it cancels, and what the run's result says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from command import dray
from dray.contract import processes
from dray.contract.findings import ConfigError, UnfitError
from dray.facts import Facts
from dray.runs import submit
from dray.runs.active_run.stop import stop_run
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.result import result_of, summary
from dray.runs.slurm import Slurm as Known
from dray.runs.status import Stop, status
from dray.runs.store import RunPaths, make_run_folder, require_own
from helpers import ROOT
from slurms import Slurm

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", home="/home/me"
)
ASKED = f"squeue --array --noheader --user={os.geteuid()} --format=%A|%i|%T|%V|%r|%S|%o"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path, monkeypatch)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ("max_requeues=3",))
    return write(recipe, FACTS, runs=tmp_path / "my runs", run="mine")[1]


def stop(run: Path, *, now: bool = False, wait: bool = False) -> str:
    said: list[str] = []
    stop_run(run, now=now, wait=wait, say=said.append)
    return "\n".join(said)


def queued(run: Path, job: int, when: float) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "job.json").write_text(json.dumps({"job": job, "time": when, "argv": ["sbatch"]}))


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def test_a_running_job_is_asked_by_its_file(slurm: Slurm, paths: RunPaths) -> None:
    slurm.has(17, "RUNNING")
    assert stop(paths.run) == "mine, attempt 1 was asked to save and end: job 17, RUNNING"
    assert (paths.stop.read_text(), slurm.calls) == ("dray stop\n", [])
    assert (slurm.folder / "calls").read_text() == f"{ASKED}\n"


def test_its_last_words_are_shown_once_it_has_ended(slurm: Slurm, paths: RunPaths, monkeypatch) -> None:
    slurm.has(17, "RUNNING")
    looks = []

    def ends(_seconds: float) -> None:
        looks.append(1)
        finish(paths, code=75)

    monkeypatch.setattr("dray.runs.active_run.stop.time", SimpleNamespace(sleep=ends, monotonic=time.monotonic))
    shown = stop(paths.run, wait=True)
    result = result_of(paths)
    assert result
    assert (result.status, result.exit_code, result.reason, result.next) == ("stopped", 75, "dray stop", None)
    assert shown.splitlines()[1:] == summary(result, paths).splitlines()
    assert re.fullmatch(r"stopped by dray stop at \S+, before the first step was logged", shown.splitlines()[1])
    assert looks == [1]
    slurm.has(17, "COMPLETING")
    assert stop(paths.run).startswith("mine has already ended\nstopped by dray stop at ")


@pytest.mark.parametrize(
    ("code", "heard", "status", "reason"),
    [
        (75, None, "stopped", "dray stop"),
        (75, "the time limit", "stopped", "dray stop"),
        (143, "preemption", "stopped", "dray stop"),
        (0, None, "failed", None),  # of dray's trainer, which left no model here
        (1, None, "failed", None),
        (69, None, "failed", None),
    ],
)
def test_it_never_goes_back_into_the_queue(
    paths: RunPaths, code: int, heard: str | None, status: str, reason: str | None
) -> None:
    (paths.checkpoints / "step-20").mkdir()
    paths.metrics.write_text('{"event": "start", "first_step": 0, "steps": 50}\n{"event": "step", "step": 20}\n')
    paths.stop.write_text("USR1\ndray stop\n")
    stopped = Stop(heard, "2026-11-24T05:00:00Z") if heard else None
    result = finish(paths, code=code, stopped=stopped, batch=True)
    assert (result.status, result.reason, result.next, paths.next.exists()) == (status, reason, None, False)


@pytest.mark.parametrize(
    ("state", "call"),
    [
        *(
            (state, "scancel --state=PENDING 18") for state in ("PENDING", "EXPEDITING", "REQUEUED")
        ),  # may start meanwhile
        *((state, "scancel 18") for state in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED")),
        ("CONFIGURING", "scancel 18"),
    ],
)
def test_a_job_that_has_not_begun_is_cancelled(slurm: Slurm, tmp_path: Path, state: str, call: str) -> None:
    run = tmp_path / "queued"
    queued(run, 18, time.time())
    slurm.has(18, state, submitted=stamp(time.time() - 60))
    assert stop(run) == f"the job was cancelled: job 18, {state}\nthe run never started\nrun folder: {run}"
    assert slurm.calls == [call]
    seen = status(run, Known())
    assert (seen.state, seen.why) == ("stopped", "dray stop cancelled job 18 in the queue; the run never started")
    assert stop(run) == f"queued has already ended\nthe run never started\nrun folder: {run}"


def test_a_requeued_job_is_cancelled_where_it_waits(slurm: Slurm, paths: RunPaths) -> None:
    (paths.checkpoints / "step-20").mkdir()
    paths.metrics.write_text('{"event": "start", "first_step": 0, "steps": 50}\n{"event": "step", "step": 20}\n')
    finish(paths, code=75, stopped=Stop("the time limit", "2026-11-24T05:00:00Z"), batch=True)
    slurm.has(17, "PENDING")
    said = stop(paths.run).splitlines()
    assert said[0] == "the job was cancelled: job 17, PENDING"
    assert said[1:] == summary(result_of(paths), paths).splitlines()
    assert f"  safe:   all up to step 20, in {paths.checkpoints}/step-20" in said
    assert slurm.calls == ["scancel --state=PENDING 17"]


def test_a_job_that_slurm_put_back_after_a_node_died_is_cancelled(slurm: Slurm, paths: RunPaths) -> None:
    """Its attempt has left no result."""
    slurm.has(17, "PENDING")
    assert stop(paths.run).splitlines() == [
        "the job was cancelled: job 17, PENDING", f"it left no result; dray why '{paths.run}' shows more",
    ]  # fmt: skip


def test_another_cluster_of_the_same_slurm_is_asked(slurm: Slurm, tmp_path: Path) -> None:
    """As dray submit wrote it down; what is shown of the run is what is done to it."""
    run = tmp_path / "queued"
    queued(run, 18, time.time() - 60)
    told = json.loads((run / "job.json").read_text())
    (run / "job.json").write_text(json.dumps(told | {"cluster": "far"}))
    slurm.has(18, "PENDING", submitted=stamp(time.time() - 60))
    seen = status(run, Known())
    assert (seen.state, seen.waiting and seen.waiting.state, status(run).kind) == ("queued", "PENDING", "queued")
    argv = ASKED.replace(" --format=", " --clusters=far --format=")
    assert (slurm.folder / "calls").read_text().splitlines() == [argv] * 2
    slurm.has(19, "PENDING")
    assert (status(run, Known()).state, status(run).kind) == ("lost", "ended")


@pytest.mark.parametrize(("words", "there"), [("--run={run} a.toml", True), ("--run={run}2 a.toml", False)])
def test_a_follow_on_job_is_known_by_its_command(slurm: Slurm, paths: RunPaths, words: str, *, there: bool) -> None:
    finish(paths, code=75)
    slurm.has(99, "PENDING", command=f"/my dray/slurm/multinode.sh {words.format(run=paths.run)}")
    assert (status(paths.run).kind == "queued") is there


def test_another_job_that_has_the_number_now_is_left_alone(slurm: Slurm, paths: RunPaths) -> None:
    slurm.has(17, "RUNNING", submitted=stamp(paths.plan.stat().st_mtime + 3600))
    assert stop(paths.run, now=True).startswith("mine has already ended\nit left no result; dray why ")
    assert slurm.calls == []


def test_a_job_that_slurm_itself_has_put_back_is_the_same_one(slurm: Slurm, paths: RunPaths) -> None:
    """As after a node that failed: without a result, and with a new time of submission."""
    slurm.has(17, "PENDING", submitted=stamp(paths.plan.stat().st_mtime + 3600))
    (slurm.folder / "scontrol").write_text("JobId=17 Requeue=1 Restarts=1 BatchFlag=1 ExitCode=0:0\n")
    assert status(paths.run).kind == "queued"


def test_a_job_of_which_slurm_tells_no_restarts_may_be_the_same_one(slurm: Slurm, paths: RunPaths) -> None:
    slurm.has(17, "PENDING", submitted=stamp(paths.plan.stat().st_mtime + 3600))
    (slurm.folder / "bin" / "scontrol").write_text("#!/bin/sh\necho slurmctld is busy >&2\nexit 1\n")
    assert status(paths.run).unclear == "scontrol failed with exit code 1"
    with pytest.raises(ConfigError, match="the run may be active: two jobs would write into its folder"):
        submit.require_free(paths.run, [])


def test_a_job_whose_plan_is_damaged_is_known_by_its_facts(slurm: Slurm, paths: RunPaths) -> None:
    paths.plan.write_text("half of")
    (slurm.folder / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="the run may be active: two jobs would write into its folder"):
        submit.require_free(paths.run, [])


def test_of_two_submissions_of_one_name_the_loser_removes_nothing(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "both"

    def other_is_first(run: Path, **_: object) -> None:
        make_run_folder(run)
        (run / "notes").write_text("the other's")
        raise FileExistsError

    monkeypatch.setattr(submit, "make_run_folder", other_is_first)
    with pytest.raises(FileExistsError):
        submit.enqueue(["sbatch", "x.sh"], {run: None}, "none", tmp_path, {"notes": "mine"})
    assert (run / "notes").read_text() == "the other's"


@pytest.mark.parametrize(("there", "kind"), [("elsewhere", "unknown"), ("local", "ended")])
def test_a_job_of_another_cluster_on_the_same_disk(slurm: Slurm, tmp_path: Path, there: str, kind: str) -> None:
    """Slurm here knows nothing of it: it may be alive, and no second job begins for it."""
    facts = FACTS.model_copy(update={"cluster": there})
    paths = write(read_recipe(None, (), ["sleep", "9"]), facts, runs=tmp_path / "runs", run="there")[1]
    (slurm.folder / "scontrol").write_text("ClusterName             = local\n")
    seen = status(paths.run)
    assert seen.kind == kind
    if kind == "unknown":
        assert seen.where == "the job is on cluster elsewhere, but Slurm here is local"
        with pytest.raises(ConfigError, match="the run may be active: two jobs would write into its folder"):
            submit.require_free(paths.run, [])
    finish(paths, code=78)
    assert status(paths.run).kind == "ended"


def test_an_allocation_outlives_its_run(slurm: Slurm, paths: RunPaths) -> None:
    slurm.has(17, "RUNNING")
    finish(paths, code=69)
    told = json.loads(paths.result.read_text())
    paths.result.write_text(json.dumps(told | {"next": {"requeue": False, "spare": True, "why": "x"}}))
    for shown in ("JobId=17 BatchFlag=0 ExitCode=0:0\n", ""):  # the controller may not answer
        (slurm.folder / "scontrol").write_text(shown)
        with pytest.raises(UnfitError, match="the job may be your allocation by salloc") as refused:
            stop(paths.run)
        assert refused.value.finding.fix.endswith("scancel 17 ends the whole job")
    finish(paths, code=75)
    assert stop(paths.run, now=True).startswith("mine has already ended\n")
    assert slurm.calls == []


def test_now(slurm: Slurm, paths: RunPaths) -> None:
    slurm.has(17, "RUNNING")
    assert stop(paths.run, now=True) == "mine, attempt 1 is being ended now: job 17, RUNNING"
    assert (slurm.calls, paths.stop.read_text()) == ([], "dray stop\ndray stop --now\n")


@pytest.mark.parametrize("ends", [True, False])
def test_the_runners_end_it_now(slurm: Slurm, paths: RunPaths, monkeypatch, *, ends: bool) -> None:
    """They end the ranks while the image is mounted; Slurm would signal that, too, and wait for KillWait."""
    slurm.has(17, "RUNNING")
    clock = iter((0.0, 9.0, 31.0))

    def sleep(_seconds: float) -> None:
        if ends:
            finish(paths, code=143)

    monkeypatch.setattr("dray.runs.active_run.stop.time", SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock)))
    if not ends:
        with pytest.raises(UnfitError, match="the run has not ended within 30 s"):
            stop(paths.run, now=True, wait=True)
        return
    told = stop(paths.run, now=True, wait=True)
    assert (slurm.calls, paths.stop.read_text()) == ([], "dray stop\ndray stop --now\n")
    assert "mine, attempt 1 is being ended now: job 17, RUNNING\nstopped by dray stop at " in told
    result = result_of(paths)
    assert result
    assert (result.status, result.exit_code, result.reason, result.next) == ("stopped", 143, "dray stop", None)


def test_a_command_that_takes_no_notice_is_ended_after_the_grace(slurm: Slurm, tmp_path: Path, monkeypatch) -> None:
    paths = write(read_recipe(None, (), ["sleep", "9"]), FACTS, runs=tmp_path / "runs", run="mine")[1]
    slurm.has(17, "RUNNING")
    (slurm.folder / "scontrol").write_text("BatchFlag=1\n")
    clock = iter((0.0, 60.0, 121.0, 122.0))

    def sleep(_seconds: float) -> None:
        if "dray stop --now\n" in paths.stop.read_text():
            finish(paths, code=143)

    monkeypatch.setattr("dray.runs.active_run.stop.time", SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock)))
    told = stop(paths.run, wait=True)
    assert told.splitlines()[1] == ("the program gets SIGUSR1 to save and end; after 120 s dray stop ends it")
    assert "it did not end within 120 s and is being ended now\nstopped by dray stop at " in told
    assert slurm.calls == []


class TestHere:
    """A run without Slurm."""

    def begun(self, tmp_path: Path) -> RunPaths:
        facts = FACTS.model_copy(
            update={"scheduler": "local", "job": 0, "nodelist": "node1", "nodes": 1, "engine": "bare"}
        )
        return write(read_recipe(None, (), ["sleep", "9"]), facts, runs=tmp_path / "runs", run="mine")[1]

    def test_by_its_process(self, tmp_path: Path) -> None:
        paths = self.begun(tmp_path)
        assert status(paths.run).kind == "unknown"
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
            mark = processes.mark(running.pid)
            paths.process.write_text(json.dumps(mark))
            asked = f"mine, attempt 1 was asked to save and end: process {running.pid}"
            assert stop(paths.run).splitlines()[0] == asked
            running.kill()
        assert status(paths.run).kind == "ended"

    @pytest.mark.hostile("stop")
    @pytest.mark.parametrize("text", ["", "{", "[]", '["b", "n", 1, "5"]', '["b", "n", -1, "5"]', '["b", "n", 7, "5"]'])
    def test_a_file_that_names_no_process_of_here(self, tmp_path: Path, text: str) -> None:
        paths = self.begun(tmp_path)
        paths.process.write_text(text)
        assert (status(paths.run).kind, status(paths.run).process) == ("unknown", 0)


@pytest.mark.seconds
@pytest.mark.hostile("stop")
@pytest.mark.parametrize("words", [[], [""]])
def test_without_a_run(tmp_path: Path, words: list[str]) -> None:
    """It stops nothing: the newest run may be another than the one that is meant."""
    ended = dray("stop", *words, "--runs", tmp_path)
    assert (ended.returncode, ended.stdout) == (78, "")


def test_an_attempt_that_is_a_link_to_nowhere(paths: RunPaths) -> None:
    paths.folder.rename(paths.run / "elsewhere")
    paths.folder.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="the run cannot be read"):
        require_own(paths.run)


@pytest.mark.hostile("stop")
def test_another_user_s_run_and_a_fifo_in_the_place_of_the_file(slurm: Slurm, paths: RunPaths) -> None:
    slurm.has(17, "RUNNING")
    paths.folder.chmod(0o777)
    with pytest.raises(ConfigError, match="the run belongs to another user, or others may write into it"):
        require_own(paths.run)
    paths.folder.chmod(0o755)
    assert require_own(paths.folder) == require_own(paths.run) == paths.run
    paths.stop.unlink()
    os.mkfifo(paths.stop)
    with pytest.raises((ConfigError, OSError)):
        stop(paths.run)


def test_slurm_does_not_answer(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file asks all the same."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stop(paths.run) == "mine, attempt 1 was asked to save and end: squeue is not installed"


def test_a_job_that_is_gone_without_a_result(slurm: Slurm, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may show the result late: it is believed the second time."""
    slurm.has(17, "RUNNING")
    clock = iter(range(0, 1000, 11))
    left = (slurm.folder / "squeue").unlink, (slurm.folder / "squeue").touch
    sleeps = []

    def sleep(_seconds: float) -> None:
        sleeps.append(1)
        for empty in left if len(sleeps) == 1 else ():
            empty()

    monkeypatch.setattr("dray.runs.active_run.stop.time", SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock)))
    assert stop(paths.run, wait=True).splitlines()[1:] == [
        f"it left no result; dray why '{paths.run}' shows more",
    ]
    assert len(sleeps) == 2


def test_a_stopped_run_that_slurm_has_put_back_is_no_free_one(slurm: Slurm, paths: RunPaths) -> None:
    """As after a preemption: dray did not requeue it, and it waits with its own number."""
    finish(paths, code=75, stopped=Stop("preemption", "2026-11-24T05:00:00Z"), batch=True)
    slurm.has(17, "PENDING")
    assert status(paths.run).kind == "queued"
    with pytest.raises(ConfigError, match="the run is active: two jobs would write into its folder"):
        submit.require_free(paths.run, [])


def test_a_job_without_an_attempt_while_slurm_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    queued(tmp_path / "waits", 18, time.time())
    with pytest.raises(UnfitError, match="this machine cannot tell whether the job has started"):
        stop(tmp_path / "waits")


def test_another_user_s_job_is_not_taken_for_gone(slurm: Slurm, paths: RunPaths, monkeypatch) -> None:
    """Slurm with PrivateData lists none of them."""
    assert status(paths.run).kind == "ended"
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert (status(paths.run).kind, status(paths.run).unclear) == ("unknown", f"the job belongs to user {mine}")


def test_a_run_with_spare_nodes_goes_on_in_the_same_job(slurm: Slurm, paths: RunPaths, tmp_path: Path) -> None:
    """Between two attempts neither a second job begins for it, nor does an allocation end."""
    finish(paths, code=69)
    told = json.loads(paths.result.read_text()) | {"next": {"requeue": False, "spare": True, "why": "x"}}
    paths.result.write_text(json.dumps(told))
    slurm.has(17, "RUNNING")
    assert status(paths.run).kind == "starting"
    with pytest.raises(ConfigError, match="the run is active: two jobs would write into its folder"):
        submit.require_free(paths.run, [])
    (slurm.folder / "scontrol").write_text("BatchFlag=0\n")
    with pytest.raises(UnfitError, match="the job may be your allocation by salloc"):
        stop(paths.run)
    (slurm.folder / "scontrol").write_text("BatchFlag=1\n")
    assert stop(paths.run).startswith("the job was cancelled: job 17, RUNNING\n")
    assert slurm.calls == ["scancel 17"]
    assert status(paths.run).kind == "ended"


@pytest.mark.parametrize("silent", [True, False])
def test_a_run_that_is_submitted_again(slurm: Slurm, paths: RunPaths, *, silent: bool) -> None:
    """It has not ended while Slurm cannot tell of its new job; the attempt that has ended is not asked to end."""
    finish(paths, code=1)
    queued(paths.run, 17, time.time())
    assert status(paths.run).kind == "ended"  # the job that has begun
    queued(paths.run, 60, time.time() - 5)
    if silent:
        (slurm.folder / "bin" / "squeue").write_text("#!/bin/sh\necho down >&2\nexit 1\n")
    said = "squeue failed with exit code 1" if silent else (
        "it was submitted or began a moment ago, so squeue does not list it yet"
    )  # fmt: skip
    assert (status(paths.run).kind, status(paths.run).unclear) == ("unknown", said)
    with pytest.raises(ConfigError, match="the run may be active: two jobs would write into its folder"):
        submit.require_free(paths.run, [])
    with pytest.raises(UnfitError, match="this machine cannot tell whether the job has started"):
        stop(paths.run)
    assert paths.stop.read_text() == ""
    if not silent:
        queued(paths.run, 60, time.time() - 60)
        assert status(paths.run).kind == "ended"
        submit.require_free(paths.run, [])
