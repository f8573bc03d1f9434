"""One task of a job array, as dray asks Slurm for it, shows it and stops it: its number is never that of its array."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dray.cli.runs import status_text
from dray.contract.findings import ConfigError
from dray.facts import Facts, parse, to_text
from dray.runs import store, submit
from dray.runs.active_run.stop import stop_run
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.report import why
from dray.runs.slurm import Slurm as Queue
from dray.runs.slurm import jobs
from dray.runs.status import Stop
from dray.runs.status import status as look
from dray.runs.store import RunPaths
from helpers import ROOT
from slurms import Slurm

# Tasks 3 and 4 have never begun: the array's number is theirs. Task 2 has, and waits again.
WAITING = ((13, "12_1", "RUNNING"), (14, "12_2", "PENDING"), (12, "12_3", "PENDING"), (12, "12_4", "PENDING"))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm(tmp_path, monkeypatch)
    (made.folder / "scontrol").write_text("ClusterName = local\nJobId=14 ArrayJobId=12 ArrayTaskId=2 BatchFlag=1\n")
    return made


def queued(runs: Path, task: int, *, job: int = 12, ago: float = 3600) -> Path:
    run = runs / f"s-{task}"
    run.mkdir(parents=True, exist_ok=True)
    about = {"job": job, "task": task, "time": time.time() - ago, "argv": ["sbatch", "--job-name=tiny"]}
    (run / "job.json").write_text(json.dumps(about))
    return run


def begun(runs: Path, task: int, number: int) -> RunPaths:
    queued(runs, task)
    facts = Facts(
        scheduler="slurm", job=number, task=f"12_{task}", nodelist="n[1-2]", nodes=2, engine="apptainer",
        image="/i.sif", cluster="local",
    )  # fmt: skip
    assert parse(to_text(facts), where="") == facts
    return write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml"), facts, runs=runs, run=f"s-{task}")[1]


def stop(run: Path) -> str:
    told: list[str] = []
    stop_run(run, now=False, wait=False, say=told.append)
    return "\n".join(told)


def test_one_that_waits_is_cancelled_alone(slurm: Slurm, tmp_path: Path) -> None:
    run = queued(tmp_path, 3)
    slurm.lists(*WAITING)
    assert look(run).where == "job 12_3, PENDING"
    assert stop(run) == f"the job was cancelled: job 12_3, PENDING\nthe run never started\nrun folder: {run}"
    assert slurm.calls == ["scancel --state=PENDING 12_3"]
    left = [job.id for job in jobs()]
    assert (left, look(run).kind) == (["12_1", "12_2", "12_4"], "ended")
    assert look(queued(tmp_path, 4)).where == "job 12_4, PENDING"


def test_squeue_is_asked_for_each_task(slurm: Slurm) -> None:
    jobs()
    (asked,) = (slurm.folder / "calls").read_text().splitlines()
    assert asked == f"squeue --array --noheader --user={os.geteuid()} --format=%A|%i|%T|%V|%r|%S|%o"


def test_each_is_shown_by_its_own_number(slurm: Slurm, tmp_path: Path) -> None:
    slurm.lists(*WAITING)
    queue = Queue()
    runs = begun(tmp_path, 1, 13), begun(tmp_path, 2, 14)
    finish(runs[1], code=75, stopped=Stop("the time limit", "2026-11-24T05:00:00Z"), batch=True)
    seen = [look(run, queue, closely=True) for run in (runs[0].run, runs[1].run, queued(tmp_path, 3))]
    assert [(one.state, one.job_id, one.waiting and one.waiting.id) for one in seen] == [
        ("running", "12_1", None),
        ("queued", "12_2", "12_2"),
        ("queued", "12_3", "12_3"),
    ]
    assert status_text(seen[0])[0] == "s-1: running (smoke-cpu, attempt 1, job 12_1, 4 ranks on n1 n2)"
    assert status_text(seen[2])[:2] == [
        "s-3: queued (job 12_3)",
        "  Slurm: job 12_3 PENDING, Slurm gives no reason yet",
    ]


def test_one_that_has_begun_is_not_taken_for_one_that_was_submitted(slurm: Slurm, tmp_path: Path) -> None:
    """Its number, and that of the array, are others."""
    paths = begun(tmp_path, 1, 13)
    slurm.lists(*WAITING)
    assert (look(paths.run).kind, look(paths.run).slurm_job) == ("running", jobs()[0])
    with pytest.raises(ConfigError, match="afterany:12_1"):
        submit.require_free(paths.run, [])
    finish(paths, code=1)
    slurm.lists(*WAITING[1:])
    assert (look(paths.run).kind, look(paths.run, Queue()).state) == ("ended", "failed")


def test_the_last_one_has_the_array_s_number(slurm: Slurm, tmp_path: Path) -> None:
    first, last = begun(tmp_path, 1, 13), begun(tmp_path, 3, 12)
    slurm.lists((13, "12_1", "RUNNING"), (12, "12_3", "RUNNING"))
    assert [look(one.run).where for one in (first, last)] == ["job 12_1, RUNNING", "job 12_3, RUNNING"]
    stop_run(last.run, now=True, wait=False, say=lambda _: None)
    assert [one.stop.read_text() for one in (first, last)] == ["", "dray stop\ndray stop --now\n"]
    assert look(first.run).kind == "running"


def test_one_whose_job_is_gone(slurm: Slurm, tmp_path: Path) -> None:
    """The others of its array are no sign of it."""
    slurm.lists(*WAITING)
    seen = look(queued(tmp_path, 9), Queue())
    told = "job 12_9 ended before its first attempt: see its output, job-12_9.log"
    assert (seen.state, seen.why) == ("lost", told)
    just = queued(tmp_path, 8, ago=0)
    assert look(just).unclear == "it was submitted or began a moment ago, so squeue does not list it yet"


def test_slurm_s_accounting_is_asked_of_it_alone(slurm: Slurm, tmp_path: Path) -> None:
    sacct = slurm.folder / "bin" / "sacct"
    sacct.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$*\" >'{tmp_path}/asked'\necho TIMEOUT\n")
    sacct.chmod(0o755)
    report = why.look(begun(tmp_path, 3, 12))
    assert report.evidence == ["Slurm: job 12_3: TIMEOUT"]
    assert (tmp_path / "asked").read_text() == "-X -n -P --jobs=12_3 --clusters=local --format=State\n"


class TestNamed:
    @pytest.fixture
    def runs(self, tmp_path: Path) -> Path:
        for task, number in ((1, 13), (2, 14), (10, 12)):
            begun(tmp_path, task, number)
        queued(tmp_path, 3)
        return tmp_path

    @pytest.mark.parametrize(("word", "run"), [("12_1", "s-1"), ("12_3", "s-3"), ("12_10", "s-10")])
    def test_one_is_found(self, word: str, run: str, runs: Path) -> None:
        assert store.find(word, runs) == runs / run

    def test_the_array_is_no_run(self, runs: Path) -> None:
        with pytest.raises(ConfigError, match="there is no such run") as refused:
            store.find("12", runs)
        assert "12_3 for a task of an array" in refused.value.finding.wanted

    @pytest.mark.seconds
    @pytest.mark.parametrize("word", ["12_4", "12_", "_3", "12_3_1", "12-3", "12_\uff13", f"{10**18}_1"])
    def test_there_is_none(self, word: str, runs: Path) -> None:
        with pytest.raises(ConfigError, match="there is no such run"):
            store.find(word, runs)

    @pytest.mark.parametrize("text", ['{"job": 12, "task": []}', '{"job": 12, "task": "x"}', "[12]", "{"])
    def test_a_damaged_record_names_none(self, text: str, runs: Path) -> None:
        (runs / "s-3" / "job.json").write_text(text)
        assert store.find("12_2", runs) == runs / "s-2"
        with pytest.raises(ConfigError, match="there is no such run"):
            store.find("12_3", runs)
