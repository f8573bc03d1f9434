"""`dray watch`: what it says of a run, once each, and what it does where the recipe allows that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dray.cli import runs as verb
from dray.contract.findings import DrayError
from dray.facts import Facts
from dray.runs.active_run.watch import Watcher, news
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.slurm import Job
from dray.runs.status import Live, State, Watched
from dray.runs.status import status as look
from dray.runs.store import RunPaths
from helpers import ROOT
from slurms import Slurm

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", home="/home/me"
)


def seen(state: str = "running", **fields: object) -> State:
    return State.model_validate({"run": "mine", "folder": "/runs/mine", "state": state, "attempt": 1, **fields})


def job(state: str, reason: str = "None") -> Job:
    return Job(17, "17", state, 0.0, reason, None, "multinode.sh")


QUEUED = job("PENDING", "Priority")
LOST = Live(stage="training", notes=["failed: rank-1", "lost: node 1"])


@pytest.mark.parametrize(
    ("state", "lines"),
    [
        (seen("queued", attempt=None, waiting=QUEUED), ["queued (Priority)"]),
        (seen(), ["attempt 1: running"]),
        (seen("queued", waiting=QUEUED, step=20), ["attempt 1: queued (Priority)"]),
        (seen("stopped", why="preemption", step=2000, goes_on=True),
         ["attempt 1: stopped, preemption"]),
        (seen("failed", why="rank 1 failed"), ["attempt 1: failed, rank 1 failed"]),
        (seen("queued", slurm_job=job("REQUEUE_HOLD", "JobHoldMaxRequeue")),
         ["attempt 1: queued",
          "Slurm holds job 17 (JobHoldMaxRequeue); scontrol release 17 releases it"]),
        (seen(slurm_job=job("COMPLETING")),
         ["attempt 1: running", "job 17 has been ending for 10 min: a process or a disk hangs"]),
        (seen(live=Live(stage="training", quiet_s=599.0)), ["attempt 1: running"]),
        (seen(live=Live(stage="training", quiet_s=660.0)), ["attempt 1: running", "attempt 1: no output for 11 min"]),
        (seen(live=LOST),
         ["attempt 1: running", "attempt 1: failed: rank-1", "attempt 1: lost: node 1"]),
        (seen(live=Live(stage="training", notes=["the loss is not finite any more", "slow: rank 1"])),
         ["attempt 1: running", "attempt 1: the loss is not finite any more"]),
    ],
)  # fmt: skip
def test_what_there_is_to_say(state: State, lines: list[str]) -> None:
    assert [*news(state).values()] == lines


def test_a_run_that_diverges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    paths = begun(tmp_path, 0)
    event = {"event": "divergence", "last_step": 7, "why": "the loss jumped at step 7: 9.0000"}
    paths.metrics.write_text(json.dumps(event) + "\n")
    live = look(paths.run, closely=True).live
    assert "attempt 1: the loss jumped at step 7: 9.0000" in news(seen(live=live)).values()


def test_of_many_slow_ranks_the_last_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    paths = begun(tmp_path, 0)
    events = [{"event": "slow", "rank": rank, "node": "n1", "times": 1.5} for rank in range(40)]
    paths.metrics.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    live = look(paths.run, closely=True).live
    assert live
    slow = [note for note in live.notes if note.startswith("slow")]
    assert [note.partition(" on ")[0] for note in slow] == [f"slow: rank {rank}" for rank in range(36, 40)]


def watcher(run: Path = Path("/runs/mine"), submit: object = lambda: None) -> tuple[Watcher, list[str]]:
    said: list[str] = []
    return Watcher(run, lambda line, _seen: said.append(line), submit), said  # type: ignore[arg-type]


def test_each_thing_is_said_once_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("dray.runs.active_run.watch.time.monotonic", lambda: now[0])
    watching, said = watcher()
    ends = seen(slurm_job=job("COMPLETING"))
    for state, at in ((seen(), 0), (seen(), 30), (ends, 60), (ends, 600), (ends, 661), (ends, 700), (seen(), 800)):
        now[0] = at
        watching.tell(state)
    assert said == ["attempt 1: running", "job 17 has been ending for 10 min: a process or a disk hangs"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setattr(Watched, "ask_s", -1.0)
    return Slurm(tmp_path, monkeypatch)


def begun(tmp_path: Path, requeues: int) -> RunPaths:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", (f"max_requeues={requeues}",))
    return write(recipe, FACTS, runs=tmp_path / "runs", run="mine")[1]


@pytest.mark.parametrize(("requeues", "released"), [(1, ["release 17"]), (0, [])])
def test_a_held_job_is_released_as_often_as_the_recipe_allows(
    slurm: Slurm, tmp_path: Path, requeues: int, released: list[str]
) -> None:
    paths = begun(tmp_path, requeues)
    slurm.has(17, "REQUEUE_HOLD")
    watching, said = watcher(paths.run)
    waits = 0

    def wait(_seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            slurm.lists()
            finish(paths, code=1)

    assert watching.watch(wait).state == "failed"
    calls = (slurm.folder / "calls").read_text().splitlines()
    assert [call.removeprefix("scontrol ") for call in calls if "release" in call] == released
    assert said[1] == "Slurm holds job 17 (None); scontrol release 17 releases it"
    assert ("released job 17, as max_requeues allows" in said) is bool(released)


@pytest.mark.parametrize(
    ("requeues", "result", "refused", "said"),
    [
        (1, False, False, "the next attempt was submitted, as max_requeues allows"),
        (1, False, True, "the next attempt was not submitted: no"),
        (0, False, False, ""),
        (1, True, False, ""),  # a disk that shows it late
    ],
)
def test_a_run_whose_job_died_is_submitted_again(
    slurm: Slurm, tmp_path: Path, requeues: int, said: str, *, result: bool, refused: bool
) -> None:
    """Its first node is gone, so nobody wrote a result."""
    paths, submitted = begun(tmp_path, requeues), []

    def submit() -> None:
        if refused:
            raise DrayError("no")
        submitted.append(1)
        job = {"job": 18, "time": 1e10, "argv": ["sbatch"]}
        (paths.run / "job.json").write_text(json.dumps(job))
        slurm.has(18, "PENDING")

    def wait(_seconds: float) -> None:
        if result or submitted:
            finish(paths, code=1)
            (paths.run / "job.json").unlink(missing_ok=True)
            slurm.lists()

    watching, lines = watcher(paths.run, submit)
    watching.watch(wait)
    (slurm.folder / "scontrol").write_text("")
    assert lines[0].startswith("attempt 1: lost")
    assert lines[1:2] == ([said] if said else lines[1:2])
    assert len(submitted) == ("was submitted" in said)


def test_a_webhook_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hook"
    monkeypatch.setenv("DRAY_WEBHOOK_FILE", str(file))
    assert verb._webhook() == ""
    file.write_text("https://example.org/x\n")
    for mode, url in ((0o644, ""), (0o600, "https://example.org/x")):
        file.chmod(mode)
        assert verb._webhook() == url
    assert capsys.readouterr().err == f"dray: warning: {file} is not used: chmod 600 it, since its URL is a secret\n"


def test_a_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One message to sendmail, whatever is in the run's name."""
    monkeypatch.setattr(verb, "_SENDMAIL", f'printf "%s\\n" "$1" >{tmp_path}/mail')
    verb._mail("me@example.org", seen(run="$(touch x)"), "attempt 1: lost")
    assert (tmp_path / "mail").read_text() == (
        "To: me@example.org\nSubject: dray: $(touch x): running\n\nattempt 1: lost\n\nrun folder: /runs/mine\n"
    )
    monkeypatch.setattr(verb, "_SENDMAIL", "exit 75")
    verb._mail("me@example.org", seen(), "x")
    assert capsys.readouterr().out == "dray: warning: the mail was not sent: bash failed with exit code 75\n"
