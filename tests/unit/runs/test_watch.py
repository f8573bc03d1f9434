"""`dray runs`, `status`, `logs` and `top`, on runs in any state, with a Slurm and without one."""

from __future__ import annotations

import calendar
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import warm
from damage import DAMAGES, damaged
from dray.cli import args, runs, streams
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.runs.active_run.logs import of
from dray.runs.finish import finish
from dray.runs.metrics import tail
from dray.runs.prepare import read_recipe, write
from dray.runs.slurm import Slurm, meaning
from dray.runs.status import State, Stop, Watched, write_summary
from dray.runs.status import status as look
from dray.runs.store import RunPaths, find
from helpers import PYTHON, ROOT, bash_blocks, section

NOW = 1795570000.0
STEP = (
    '{{"event": "step", "time": {time}, "step": {step}, "loss": {loss}, "tokens_per_s": 1000.0, "seconds_left": 90}}\n'
)


def facts(job: int) -> Facts:
    return Facts(
        scheduler="slurm", job=job, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", cluster="local"
    )


def begun(folder: Path, job: int = 51, run: str = "mine") -> RunPaths:
    """An attempt whose files are old."""
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["train.steps=60", "ranks_per_node=1"])
    paths = write(recipe, facts(job), runs=folder, run=run)[1]
    settle(paths, NOW)
    return paths


def settle(paths: RunPaths, at: float) -> None:
    for path in paths.folder.rglob("*"):
        os.utime(path, (at, at))


def steps(paths: RunPaths, *numbers: int, time: float = NOW) -> None:
    """Metrics of a start and these steps, ten seconds from one to the next."""
    start = {"event": "start", "time": time + 20, "world_size": 2, "steps": 60, "first_step": 0}
    lines = [STEP.format(time=time + 20 + 10 * number, step=number, loss=6 - number / 10) for number in numbers]
    paths.metrics.write_text(json.dumps(start) + "\n" + "".join(lines))


def queued(folder: Path, job: int, run: str = "waits", since: float = NOW) -> Path:
    (folder / run).mkdir(exist_ok=True)
    about = {"job": job, "cluster": "", "time": since, "argv": ["sbatch", "--job-name=gpt2", "multinode.sh"]}
    (folder / run / "job.json").write_text(json.dumps(about))
    return folder / run


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


DATE = re.compile(r"(?<=\|)20\d\d-\S{14}(?=\|)")


def epoch(stamp: re.Match[str]) -> str:
    """As squeue prints a time with SLURM_TIME_FORMAT=%s."""
    return f"{calendar.timegm(time.strptime(stamp[0], '%Y-%m-%dT%H:%M:%S'))}"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A squeue that prints these lines, and writes down how it was called; the cluster is called `local`."""
    folder = tmp_path / "bin"

    def fake(*lines: str) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "lines").write_text("".join(f"{DATE.sub(epoch, line)}\n" for line in lines))
        (folder / "squeue").write_text(
            f"#!/bin/sh\nprintf '%s\\n' \"$SLURM_TIME_FORMAT\" \"$@\" >>'{folder}/asked'\ncat '{folder}/lines'\n"
        )
        (folder / "scontrol").write_text("#!/bin/sh\necho 'ClusterName             = local'\n")
        for name in ("squeue", "scontrol"):
            (folder / name).chmod(0o755)
        return folder / "asked"

    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setenv("USER", "nobody-else")
    return fake


def stopped(paths: RunPaths, *, reason: str = "the time limit") -> None:
    finish(paths, code=75, stopped=Stop(reason, "2026-11-25T01:38:48Z"))


def test_states_by_slurm_in_one_call(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    waits, plans, gone = (queued(folder, job, f"queued-{job}") for job in (1, 2, 3))
    new_one = queued(folder, 4, "queued-4", since=time.time())
    running, lost, again, follow, other, salloc = (begun(folder, job, f"begun-{job}") for job in range(11, 17))
    stopped(again)
    stopped(follow)
    facts_of = other.facts.read_text().replace("cluster=local", "cluster=elsewhere")
    other.facts.write_text(facts_of)
    asked = slurm(
        "1|1|PENDING|2026-11-24T05:00:00|Priority|N/A|/c/slurm/multinode.sh x",
        "2|2|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:00:00|/c/slurm/multinode.sh",
        "11|11|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:00:00|/c/slurm/multinode.sh",
        "16|16|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:00:00|(null)",
        "13|13|PENDING|2026-11-24T05:00:00|BeginTime|2030-01-01T00:00:00|/c/slurm/multinode.sh a|b",
        f"99|99|PENDING|2026-11-24T05:00:00|Dependency|N/A|/c/slurm/multinode.sh --run={follow.run} recipe.toml",
        "a line that is none",
    )
    queue = Slurm()
    every = (waits, plans, gone, new_one, *(paths.run for paths in (running, lost, again, follow, other, salloc)))
    found = {path.name: look(path, queue) for path in every}
    assert {name: one.state for name, one in found.items()} == {
        "queued-1": "queued",
        "queued-2": "running",
        "queued-3": "lost",
        "queued-4": "queued",
        "begun-11": "running",
        "begun-12": "lost",
        "begun-13": "queued",
        "begun-14": "queued",
        "begun-15": "no result",
        "begun-16": "no result",
    }
    assert asked.read_text().splitlines() == [
        "%s", "--array", "--noheader", f"--user={os.geteuid()}", "--format=%A|%i|%T|%V|%r|%S|%o",
    ]  # fmt: skip
    assert found["begun-13"].waiting
    assert found["begun-13"].waiting.start == 1893456000.0
    assert found["begun-14"].job_id == "99"
    assert found["queued-3"].why == "job 3 ended before its first attempt: see its output, job-3.log"


def test_a_result_that_came_meanwhile_is_no_loss(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    slurm()
    paths = begun(tmp_path)

    class Late(Slurm):
        @property
        def cluster(self) -> str:  # type: ignore[override]  # asked after squeue
            stopped(paths)
            return "local"

    assert look(paths.run, Late()).state == "stopped"


def test_a_number_that_slurm_gives_again(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    """A requeued job has the time of its requeue as that of its submission, and is the same."""
    paths = begun(tmp_path)
    scontrol = slurm("51|51|RUNNING|2026-11-25T05:00:00|None|2026-11-25T05:00:01|x").with_name("scontrol")
    assert look(paths.run, Slurm()).state == "lost"
    scontrol.write_text("#!/bin/sh\necho ClusterName = local; echo JobId=51 Requeue=1 Restarts=1 BatchFlag=1\n")
    assert look(paths.run, Slurm()).state == "running"


def test_a_run_that_is_submitted_again(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    paths = begun(tmp_path)
    finish(paths, code=1)
    os.utime(paths.result, (NOW, NOW))
    queued(tmp_path, 60, "mine", since=time.time())
    submitted = "2026-11-25T01:30:00"
    slurm(f"60|60|PENDING|{submitted}|Priority|N/A|/c/multinode.sh --run={paths.run} x")
    assert look(paths.run, Slurm()).state == "queued"
    slurm(f"60|60|RUNNING|{submitted}|None|2026-11-25T02:00:00|/c/multinode.sh --run={paths.run} x")
    assert look(paths.run, Slurm()).state == "running"
    slurm()
    assert look(paths.run, Slurm()).state == "queued"  # job.json is new, and squeue lists a job some seconds later
    queued(tmp_path, 60, "mine", since=NOW + 60)
    assert look(paths.run, Slurm()).state == "failed"


def test_an_earlier_attempt_is_not_what_slurm_runs_now(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    slurm("51|51|RUNNING|2026-11-24T05:00:00|None|N/A|x")
    first = begun(tmp_path)
    begun(tmp_path)
    assert look(first.folder, Slurm()).state == "lost"
    assert look(first.run, Slurm()).state == "running"


@pytest.mark.parametrize("answer", ["none", "fails", "hangs"])
def test_without_slurm_the_files_decide(
    tmp_path: Path, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    if answer != "none":
        squeue = slurm().with_name("squeue")
        squeue.write_text("#!/bin/sh\nexec sleep 60\n" if answer == "hangs" else "#!/bin/sh\nexit 1\n")
    monkeypatch.setattr("dray.runs.slurm._ANSWER_S", 0.2)
    paths, waits, queue = begun(tmp_path), queued(tmp_path, 1), Slurm()
    known = "no result" if answer == "none" else "queued"
    assert (look(paths.run, queue).state, look(waits, queue).state) == ("no result", known)
    paths.checkpoints.joinpath("lease.json").write_text("{}")  # which is touched while it trains
    assert look(paths.run, queue).state == "running"
    stopped(paths)
    assert look(paths.run, queue).state == "stopped"
    again = queued(tmp_path, 2, "mine")
    os.utime(again / "job.json", (time.time() + 5,) * 2)
    assert look(again, queue).state == ("stopped" if answer == "none" else "queued")


def test_a_job_where_there_is_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have ended long ago; nobody waits for it for ever."""
    monkeypatch.setenv("PATH", "/nowhere")
    waits = queued(tmp_path, 1)
    assert runs.status_text(look(waits, Slurm())) == [
        "waits: no result (job 1)",
        "  this machine has no Slurm, so it cannot tell whether job 1 waits, runs or has ended",
        f"run folder: {waits}",
    ]


@pytest.mark.parametrize(
    ("content", "warning"),
    [("{}", "names no job"), ("[]", "cannot be read: no JSON object"), (None, "cannot be read: a folder")],
)
def test_a_damaged_record_of_a_job(tmp_path: Path, content: str | None, warning: str) -> None:
    file = queued(tmp_path, 60) / "job.json"
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    seen = look(file.parent, Slurm())
    assert (seen.state, seen.warnings) == ("no result", [f"{file} {warning}"])


def test_a_runner_of_this_machine_holds_its_folder(tmp_path: Path) -> None:
    from dray.contract import scratch

    paths = begun(tmp_path, job=0)
    own = json.loads(paths.plan.read_text())["scratch"]
    lock = scratch.take(own)
    try:
        assert look(paths.run, Slurm()).state == "running"
    finally:
        os.close(lock)
    assert look(paths.run, Slurm()).state == "lost"
    Path(own, "lock").unlink()
    Path(own).rmdir()
    assert look(paths.run, Slurm()).state == "no result"


def dray_runs(folder: Path, capsys: pytest.CaptureFixture[str], **options: object) -> str:
    runs.runs(**({"runs": folder} | options))  # type: ignore[arg-type]
    return capsys.readouterr().out


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/nowhere")
    folder = tmp_path / "my runs"
    first = begun(folder, 7, "first")
    steps(first, *range(1, 19))
    stopped(first)
    steps(begun(folder, 7, "first"), 20)
    stopped(RunPaths(folder / "first", 2))
    second = begun(folder, 8, "second")
    steps(second, 1, 59)
    settle(second, NOW)
    queued(folder, 9)
    for number, name in enumerate(("first/attempt-1", "first/attempt-2", "second/attempt-1", "waits")):
        os.utime(folder / name, (NOW + number, NOW + number))
    return folder


TABLE = """\
RUN     STATE      RECIPE     NODES   STEP   LOSS  STARTED           ATTEMPTS  COST
waits   no result                                  2026-11-25 01:26         0
second  no result  smoke-cpu      2  59/60  0.100  2026-11-25 01:26         1
first   stopped    smoke-cpu      2  20/60  4.000  2026-11-25 01:26         2
"""


def test_the_list(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dray_runs(several, capsys) == TABLE
    heads, waits, second, first = TABLE.splitlines(keepends=True)
    more = "the newest 1 are shown; -n 0 shows all\n"
    assert [line.split()[0] for line in dray_runs(several, capsys, last=1).splitlines()] == ["RUN", "waits", "the"]
    assert dray_runs(several, capsys, last=1).endswith(more)
    assert dray_runs(several, capsys, states=["stopped"]).splitlines()[1].split()[0] == "first"
    assert dray_runs(several, capsys, since="1m") == f"no such runs in {several}\n"
    assert dray_runs(several / "none", capsys) == f"no runs in {several / 'none'}\n"
    told = json.loads(dray_runs(several, capsys, as_json=True))
    assert [State.model_validate(one).run for one in told] == ["waits", "second", "first"]
    with pytest.raises(ConfigError, match="--state has a wrong value"):
        dray_runs(several, capsys, states=["ended"])
    assert heads + waits + second + first == TABLE


@pytest.mark.hostile("runs")
def test_no_name_makes_a_row_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the plan of somebody else's run."""
    paths = begun(tmp_path)
    plan = json.loads(paths.plan.read_text())
    plan["recipe"]["name"] = "x\nfirst  done\t\u2028\u202eenod"
    paths.plan.write_text(json.dumps(plan))
    settle(paths, NOW)
    head, row = dray_runs(tmp_path, capsys).splitlines()
    assert (head.split()[0], row.split()[0]) == ("RUN", "mine")
    assert r"x\nfirst  done\t\u2028\u202eenod" in row
    assert r"x\nfirst  done\t\u2028\u202eenod" in runs.status_text(look(paths.run, Slurm()))[0]
    assert "\u202e" not in dray_runs(tmp_path, capsys, as_json=True).encode().decode("unicode-escape")


@pytest.mark.hostile("damage")
@pytest.mark.parametrize(
    "changes",
    [
        {"state": 1}, {"attempts": []}, {"step": -1}, {"loss": float("inf")}, {"nodes": [5]}, {"spent": "x"},
        {"run": None},
    ],
)  # fmt: skip
def test_a_damaged_summary_is_not_read(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    paths = begun(tmp_path)
    stopped(paths)
    before = dray_runs(tmp_path, capsys)
    file = paths.run / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert dray_runs(tmp_path, capsys) == before
    assert find("51", tmp_path) == paths.run


def test_a_list_opens_one_file_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing of the other runs: a list of 5,000 takes under a second of a quiet machine."""
    paths = begun(tmp_path)
    stopped(paths)
    monkeypatch.setenv("PATH", "/nowhere")
    for number in range(40):
        run = RunPaths(tmp_path / f"run-{number}")
        run.folder.mkdir(parents=True)
        for file in (paths.plan, paths.facts, paths.result):
            os.link(file, run.folder / file.name)
        write_summary(run)
    opened: list[str] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if noting and event in ("open", "os.listdir", "os.scandir") and str(tmp_path) in str(arguments[0]):
            opened.append(str(arguments[0]))

    noting = True
    sys.addaudithook(note)
    try:
        assert len(dray_runs(tmp_path, capsys, last=10).splitlines()) == 12
    finally:
        noting = False
    assert opened[0] == str(tmp_path)
    assert len(opened) == 1 + 10 + 1, "\n".join(opened)  # and the row that tells whether more fit
    assert all(name.endswith("summary.json") for name in opened[1:])


def test_a_late_end_of_an_earlier_attempt_changes_no_summary(tmp_path: Path) -> None:
    first, second = begun(tmp_path, 51), begun(tmp_path, 52)
    assert (first.attempt, second.attempt) == (1, 2)
    stopped(first)
    assert not (second.run / "summary.json").exists()


@pytest.mark.parametrize(
    ("make", "stage"),
    [
        (lambda paths: None, "the nodes start"),
        (lambda paths: paths.node_log(0).write_text(""), "nodes start the image"),
        (lambda paths: (paths.folder / "rendezvous.json").write_text("{}"),
         "rendezvous: the first node waits for the others"),
        (lambda paths: paths.preflight.mkdir(), "preflight, then the launcher starts the ranks"),
        (lambda paths: paths.rank_log(0).write_text(""), "ranks load the data and build the model"),
        (steps, "compiling before the first step"),
        (lambda paths: steps(paths, 1), "training"),
        (lambda paths: steps(paths, 1, 60), "all steps are done: it evaluates, saves and writes the result"),
    ],
)  # fmt: skip
def test_the_stages(tmp_path: Path, make: Callable[[RunPaths], object], stage: str) -> None:
    paths = begun(tmp_path)
    make(paths)
    live = look(paths.run, Slurm(), closely=True).live
    assert live
    assert live.stage == stage


def test_what_a_job_waits_for(tmp_path: Path, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    waits = queued(tmp_path, 1)
    monkeypatch.setattr(time, "time", lambda: NOW)
    slurm("1|1|PENDING|2026-11-24T05:00:00|Priority|2026-11-25T03:00:00|x")
    assert runs.status_text(look(waits, Slurm(), closely=True)) == [
        "waits: queued (job 1)",
        "  Slurm: job 1 PENDING, Priority: jobs with a higher priority run first",
        "  expected start: 2026-11-25 03:00 (in 1 h 33 min); Slurm's estimate, which changes with the queue",
        f"run folder: {waits}",
    ]
    paths = begun(tmp_path)
    stopped(paths)
    slurm("51|51|PENDING|2026-11-24T05:00:00|BeginTime|2026-11-25T01:28:40|x")
    assert runs.status_text(look(paths.run, Slurm(), closely=True))[:3] == [
        "mine: queued (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)",
        "  Slurm: job 51 PENDING, BeginTime: its begin time has not come; Slurm waits two minutes before it "
        "starts a requeued job",
        "  not before: 2026-11-25 01:28 (in 2 min)",
    ]


def test_a_run_that_trains(tmp_path: Path, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slurm("51|51|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:26:00|x")
    paths = begun(tmp_path)
    steps(paths, 1, 2)
    with paths.metrics.open("a") as file:
        for fields in (
            {"event": "slow", "step": 2, "rank": 1, "node": "n2", "times": 1.31},
            {"event": "checkpoint", "checkpoint": 2, "saved": False, "why": "No space left\x1b[2J"},
        ):
            file.write(json.dumps({"time": NOW + 41, **fields}) + "\n")
    for path in (paths.rank_log(0), paths.rank_log(1)):
        path.write_text("x\n")
        os.utime(path, (NOW + 42, NOW + 42))
    (paths.folder / "stop").write_text("USR1\n")
    monkeypatch.setattr(time, "time", lambda: NOW + 45)
    os.utime(paths.metrics, (NOW + 41, NOW + 41))
    assert runs.status_text(look(paths.run, Slurm(), closely=True)) == [
        "mine: running (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)",
        "  stage: training",
        "  step 2 of 60  loss 5.8000  1,000 tokens/s  1 min 30 s left",
        "  began 2026-11-25 01:26",
        "  last sign of life: 3 s ago",
        "  slow: rank 1 on n2, 1.31 times the median rank",
        "  1 checkpoint not saved, the first of step 2: No space left\x1b[2J",
        "  asked to save and end (USR1)",
        f"run folder: {paths.run}",
    ]


def test_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    paths = begun(tmp_path)
    steps(paths, 1, 18)
    stopped(paths)
    assert runs.status_text(look(paths.run, Slurm(), closely=True)) == [
        "mine: stopped (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)",
        "stopped by the time limit at 2026-11-25T01:38:48Z, after step 18",
        "  safe:   nothing yet; checkpoint.every=N saves every N steps",
        f"  again:  dray submit --run={paths.run}  # or sbatch slurm/multinode.sh with the same --run",
        f"run folder: {paths.run}",
    ]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("QOSMaxJobsPerUserLimit", "a limit of its quality of service (QOS) is reached"),
        ("AssocGrpCpuLimit", "a limit of its account or user is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:n1",
         "nodes that it needs are down, drained or reserved, often for maintenance"),
        ("Whatever", ""),
    ],
)  # fmt: skip
def test_reasons_in_plain_words(reason: str, text: str) -> None:
    assert meaning(reason) == text


@pytest.fixture
def talks(tmp_path: Path) -> RunPaths:
    """An attempt of two nodes, whose steps were logged from 01:27:00 on."""
    paths = begun(tmp_path)
    steps(paths, 1, 2, 3)
    paths.rank_log(0).write_text("loads\nstep 1/60  loss 5\nstep 2/60  loss 4\nsaved\n")
    paths.rank_log(1).write_text("[W1125 01:26:55.5 x.cpp:1] listens\nstep 1/60  loss 5\nstep 3/60  loss 3\n")
    paths.node_log(0).write_text("dray: cores\nE1125 01:27:15.25 7 api.py] failed\nTraceback\n")
    paths.node_log(1).write_text("slurmstepd: error: *** STEP 1 CANCELLED AT 2026-11-25T01:27:05 ***\n")
    return paths


def test_the_logs_of_all_nodes_then_of_all_ranks(
    talks: RunPaths, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    talks.rank_log(1).write_bytes(b"step 1/60\nhal\xff")  # of a rank that was killed
    runs.logs(str(talks.run))
    assert capsysbinary.readouterr().out.splitlines() == [
        b"node 0 | dray: cores",
        b"node 0 | E1125 01:27:15.25 7 api.py] failed",
        b"node 0 | Traceback",
        b"node 1 | slurmstepd: error: *** STEP 1 CANCELLED AT 2026-11-25T01:27:05 ***",
        b"rank 0 | loads",
        b"rank 0 | step 1/60  loss 5",
        b"rank 0 | step 2/60  loss 4",
        b"rank 0 | saved",
        b"rank 1 | step 1/60",
        b"rank 1 | hal\xff",
    ]


def test_a_run_that_goes_on_is_waited_for(
    tmp_path: Path, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some seconds lie between its result and its place in the queue."""
    slurm("51|51|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:26:00|x")
    paths, now = begun(tmp_path), [100.0]
    stopped(paths)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watched = Watched(paths.run)
    assert watched.over(watched.look())
    result = json.loads(paths.result.read_text())
    paths.result.write_text(json.dumps(result | {"next": {"requeue": True, "why": "1 of 3"}}))
    watched = Watched(paths.run)
    assert not watched.over(watched.look())  # its job is ending
    slurm()
    now[0] += 20
    assert not watched.over(watched.look())
    now[0] += 50
    assert watched.over(watched.look())


def test_one_squeue_that_fails_ends_no_watch(
    tmp_path: Path, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two attempts; without Slurm nothing would come."""
    tool = slurm().with_name("squeue")
    tool.write_text("#!/bin/sh\nexit 1\n")
    paths = begun(tmp_path)
    stopped(paths)
    result = json.loads(paths.result.read_text())
    paths.result.write_text(json.dumps(result | {"next": {"requeue": True, "why": "1 of 3"}}))
    watched = Watched(paths.run)
    assert not watched.over(watched.look())
    tool.unlink()
    watched = Watched(paths.run)
    assert watched.over(watched.look())


def test_one_node_or_one_rank(talks: RunPaths) -> None:
    assert [log.label for log in of(talks)] == ["node 0", "node 1", "rank 0", "rank 1"]
    assert [log.label for log in of(talks, node=1)] == ["node 1", "rank 1"]
    assert [log.label for log in of(talks, rank=1)] == ["rank 1"]


def test_what_is_new_is_whole_lines(talks: RunPaths) -> None:
    (log,) = of(talks, rank=0)
    assert len(list(log.new())) == 4
    with talks.rank_log(0).open("a") as file:
        file.write("one\nhal")
        file.flush()
        assert list(log.new()) == [b"one"]
        file.write("f\n")
    assert list(log.new()) == [b"half"]
    assert list(log.new()) == []


def test_logs_follow_into_the_next_attempt(
    talks: RunPaths, slurm: Callable[..., Path], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """And end with the run."""
    slurm("51|51|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:26:00|x")

    def end() -> None:
        with talks.rank_log(0).open("a") as file:
            file.write("asked to end\n")
        slurm("51|51|PENDING|2026-11-24T05:00:00|BeginTime|N/A|x")
        stopped(talks)

    def next_one() -> None:
        slurm("51|51|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:40:00|x")
        begun(talks.run.parent).rank_log(0).write_text("resumed\n")

    def done() -> None:
        slurm()
        paths = RunPaths(talks.run, 2)
        paths.final_model.mkdir(exist_ok=True)
        stopped(paths, reason="scancel")

    events, waits = [end, next_one, done], 0

    def wait(_seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits % 5 == 3 and events:
            events.pop(0)()
        assert waits < 60

    watched = Watched(talks.run)
    watched._asked = -1e9  # each time, as after a while
    seen = watched.look()
    view = runs.LogView(rank=0)
    view.add(seen)
    looking_again(watched)
    view.print()
    view.follow(watched, seen, wait)
    out, err = capsysbinary.readouterr()
    assert out == b"loads\nstep 1/60  loss 5\nstep 2/60  loss 4\nsaved\nasked to end\nresumed\n"
    assert err.decode().splitlines() == [
        "dray: mine: running (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)",
        "dray: mine: queued (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)",
        "dray: mine: running (smoke-cpu, attempt 2, job 51, 2 ranks on n1 n2)",
        "dray: mine: stopped (smoke-cpu, attempt 2, job 51, 2 ranks on n1 n2)",
    ]


def looking_again(watched: Watched) -> None:
    """Ask Slurm each time."""
    plain = watched.look

    def fresh(*, closely: bool = False) -> State:
        watched._asked = -1e9
        return plain(closely=closely)

    watched.look = fresh  # type: ignore[method-assign]


def test_nothing_moves_a_cursor() -> None:
    line = b"\x1b[31mred\x1b[0m\t\x1b[2J\x1b]0;title\x07 \xff"
    assert streams.shown(line) == "red     \\u001b[2J\\u001b]0;title\\u0007 \ufffd"
    assert streams.shown(b"\r 10%|#\r 90%|####\r") == " 90%|####"


def test_a_rank_has_its_colour(
    talks: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    node, _, _, rank = of(talks)
    seen = look(talks.run, Slurm())
    for coloured in (True, False):
        monkeypatch.setenv("NO_COLOR", "" if coloured else "1")
        view = runs.LogView()
        view.add(seen)
        view.line(node, b"a\x1b[2J")
        view.line(rank, b"b")
        shown = ("\x1b[2mnode 0 | \x1b[0m", "\x1b[33mrank 1 | \x1b[0m") if coloured else ("node 0 | ", "rank 1 | ")
        assert capsys.readouterr().out == f"{shown[0]}a\\u001b[2J\n{shown[1]}b\n"


@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        ("120", "RUN STATE RECIPE NODES STEP LOSS STARTED ATTEMPTS COST"),
        ("90", "RUN STATE RECIPE NODES STEP LOSS STARTED"),
        ("80", "RUN STATE STEP LOSS STARTED"),
        ("60", "RUN STATE STEP LOSS"), ("9", "RUN STATE STEP LOSS"),
    ],
)  # fmt: skip
def test_a_list_fits_a_narrow_terminal(
    columns: str, heads: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = TABLE.splitlines()[0].split()
    one = {"run": "20261125-203215-gpt2-40", "state": "done", "recipe": "gpt2-wikitext-zero2", "nodes": ["n1"]}
    shown = State(folder="/runs/one", loss=3.0, started="2026-11-25T20:32:00Z", attempts=1, **one)
    for terminal in (True, False):  # a pipe gets all
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setenv("COLUMNS", columns)
        runs.print_table([shown])
        first, _ = capsys.readouterr().out.splitlines()
        assert first.split() == (heads.split() if terminal else every)


def test_no_such_log(talks: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("n9", "2", "9" * 5000):
        with pytest.raises(ConfigError, match="the run has no such node"):
            runs.logs(str(talks.run), node=name)
    for log in (talks.rank_log(0), talks.rank_log(1), talks.node_log(0), talks.node_log(1)):
        log.unlink()
    seen = look(talks.run, Slurm())
    for options in ({}, {"rank": 1}, {"node": "0", "rank": 1}):
        with pytest.raises(ConfigError, match="there is no such log") as refused:
            runs.logs(str(talks.run), **options)
        assert refused.value.finding.found == runs.status_line(seen)
    for options in ({"rank": 7}, {"rank": 7, "follow": True}):  # it never comes
        with pytest.raises(ConfigError, match="the run has no such rank"):
            runs.logs(str(talks.run), **options)


@pytest.mark.parametrize(("last", "lines"), [(1, 4), (0, 0), (99, 11)])
def test_the_last_lines_of_each_log(
    talks: RunPaths, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], last: int, lines: int
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    runs.logs(str(talks.run), last=last)
    assert len(capsysbinary.readouterr().out.splitlines()) == lines


def drawn(paths: RunPaths, width: int = 72) -> list[str]:
    console = Console(file=StringIO(), width=width)
    with console.capture() as capture:
        console.print(runs.live_screen(look(paths.run, Slurm(), closely=True)))
    return capture.get().splitlines()


def test_the_screen(talks: RunPaths, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slurm("51|51|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:26:00|x")
    settle(talks, NOW + 50)
    monkeypatch.setattr(time, "time", lambda: NOW + 53)
    (talks.failures / "rank-1.json").write_text("{}")
    lines = [line.rstrip() for line in drawn(talks)]
    assert lines == [
        "mine: running (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)",
        "  stage: training",
        "  step 3 of 60  loss 5.7000  1,000 tokens/s  1 min 30 s left",
        "  began 2026-11-25 01:27",
        "  last sign of life: 3 s ago",
        "  failed: rank-1",
        "  | loads",
        "  | step 1/60  loss 5",
        "  | step 2/60  loss 4",
        "  | saved",
    ]


@pytest.mark.seconds
def test_the_commands_of_its_page(talks: RunPaths, tmp_path: Path) -> None:
    """As a user types them, in a pipe."""
    stopped(talks)
    script = bash_blocks(section("runs.md", "# Runs", "## Watch"))
    assert script.count("\n") == 7
    program = warm.program(tmp_path / "bin" / "dray")
    path = f"{program.parent}:{os.environ['PATH']}"
    env = {**PYTHON, "PATH": path, "HOME": str(talks.run), "DRAY_RUNS": str(talks.run.parent), "RUN": "min"}
    done = subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert done.stdout.count("mine: stopped (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)") == 2


def test_in_a_pipe_it_is_lines(
    talks: RunPaths, slurm: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm("51|51|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:26:00|x")

    def wait(_seconds: float) -> None:
        if not talks.result.exists():
            with talks.metrics.open("a") as file:
                file.write(STEP.format(time=NOW + 60, step=4, loss="null"))
            stopped(talks, reason="scancel")

    runs.watch_live(talks.run, wait)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "mine: running (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)",
        "step 1  loss 5.900  1,000 tokens/s  1 min 30 s left",
        "step 2  loss 5.800  1,000 tokens/s  1 min 30 s left",
        "step 3  loss 5.700  1,000 tokens/s  1 min 30 s left",
        "step 4  loss not finite  1,000 tokens/s  1 min 30 s left",
    ]
    assert lines[5] == "mine: stopped (smoke-cpu, attempt 1, job 51, 2 ranks on n1 n2)"
    assert lines[-1] == f"run folder: {talks.run}"


def test_ctrl_c_leaves_the_run_alone(
    talks: RunPaths, slurm: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm("51|51|RUNNING|2026-11-24T05:00:00|None|2026-11-25T01:26:00|x")

    def wait(_seconds: float) -> None:
        raise KeyboardInterrupt

    before = sorted(talks.run.rglob("*"))
    runs.watch_live(talks.run, wait)
    assert capsys.readouterr().out.splitlines()[-1] == "the run goes on; dray top shows it again"
    assert sorted(talks.run.rglob("*")) == before


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
def test_a_log_that_is_no_file(talks: RunPaths, kind: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    damaged(talks.rank_log(0), DAMAGES[kind])
    runs.logs(str(talks.run))
    assert f"rank 0 | dray: this log cannot be read: {kind}, not a file\n".encode() in capsysbinary.readouterr().out


def test_the_end_of_a_million_steps(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(STEP.format(time=1, step=1, loss=1).encode() * 2000 + b'{"event": "slow", "step": 3}\n')
    events = tail(file)
    assert events[-1]["event"] == "slow"
    assert len(events) < 700


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("12h", 43200), ("2d", 172800), ("0w", 0)])
def test_an_age(text: str, seconds: float) -> None:
    assert args.age("--since", text) == seconds


@pytest.mark.parametrize("text", ["yesterday", "18:00", "-1d", "3", "\u0663d", "123456d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(ConfigError, match="--since has a wrong value") as refused:
        args.age("--since", text)
    assert refused.value.finding.found == ascii(text)


@pytest.mark.parametrize("change", [
    {}, {"recipe": 3}, {"recipe": {"train": [], "name": 7}}, {"world": []}, {"world": {"nodes": {"name": "n"}}},
    {"world": {"nodes": ["n1", {"name": None}, {"address": "x"}], "size": "many"}}, {"job": [1]}, {"scratch": {}},
    {"recipe": {"checkpoint": {"folder": 1}, "command": {"argv": ["x"]}}}, {"run_folder": None},
])  # fmt: skip
def test_a_plan_with_other_values_is_listed(tmp_path: Path, change: dict[str, object]) -> None:
    paths = begun(tmp_path)
    paths.plan.write_text(json.dumps(json.loads(paths.plan.read_text()) | change))
    for closely in (False, True):
        assert look(paths.run, Slurm(), closely=closely).attempt == 1
