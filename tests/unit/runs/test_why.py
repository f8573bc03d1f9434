"""`dray why`: half a page on a run in any state, and the archive for a bug report."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

import command
import warm
from damage import RECORD
from dray.cli.runs import status_text
from dray.facts import Facts
from dray.runs.finish import finish, known_causes
from dray.runs.prepare import read_recipe, write
from dray.runs.report import why
from dray.runs.result import summary
from dray.runs.status import Stop, stop_in_logs
from dray.runs.status import status as status_of
from dray.runs.store import RunPaths
from helpers import PYTHON, ROOT, bash_blocks, section
from slurms import Slurm

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", home="/home/me"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 14.57 GiB"
FIX = (
    "lower batch.per_device, set train.activation_checkpointing=true, or use more GPUs with fsdp or zero3; dray plan "
    "estimates the memory"
)


def begun(runs: Path, *words: str, run: str | None = "mine") -> RunPaths:
    return write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words), FACTS, runs=runs, run=run)[1]


def record(paths: RunPaths, name: str, **fields: object) -> None:
    (paths.failures / f"{name}.json").write_text(json.dumps(RECORD | fields))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Rank 3 has failed first, two others of it."""
    paths = begun(tmp_path / "my runs")
    seen = ["GPU memory: CUDA out of memory. Tried to allocate 1.95 GiB", "/dev/shm: 9.000 GB free of 9.000 GB"]
    record(paths, "rank-3", last_lines=["Traceback (most recent call last):", OOM], evidence=seen)
    record(paths, "rank-0", time=12.5, rank=0, node="n1", code=134, why="killed by SIGABRT")
    record(paths, "node-0", time=13.0, rank=None, node="n1", why="rank 0 on n1: killed by SIGABRT")
    return paths


def dray(*words: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return command.dray("why", *words, cwd=cwd, **{"HOME": "/home/me", **env})


def page(run: Path) -> list[str]:
    """Its lines, without a process of its own."""
    return why.text(why.of(run)[1]).splitlines()


PAGE = """\
mine, attempt 1: failed, exit code 3
first to fail: rank 3 on n2: exit code 3
  | Traceback (most recent call last):
  | {oom}
  log: l
  cause: out of memory on the GPU
  fix: {fix}
evidence:
  GPU memory: CUDA out of memory. Tried to allocate 1.95 GiB
  /dev/shm: 9.000 GB free of 9.000 GB
run folder: {run}
"""


@pytest.mark.seconds
def test_the_whole_page(paths: RunPaths) -> None:
    finish(paths, code=1)
    ended = dray(paths.run)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == PAGE.format(oom=OOM, fix=FIX, run=paths.run)
    assert dray("--runs", paths.run.parent).stdout == ended.stdout
    assert dray(paths.folder).stdout == ended.stdout
    told = json.loads(dray(paths.run, "--json").stdout)
    assert (told["status"], told["exit_code"], told["name"], told["fix"]) == (
        "failed",
        3,
        "out of memory on the GPU",
        FIX,
    )
    assert told["cause"]["rank"] == 3


@pytest.mark.seconds
def test_the_commands_of_its_page(paths: RunPaths, tmp_path: Path) -> None:
    finish(paths, code=1)
    text = section("runs.md", "## Why it failed")
    block = bash_blocks(text)
    program = warm.program(tmp_path / "bin" / "dray")
    env = {**PYTHON, "PATH": f"{program.parent}:{os.environ['PATH']}", "RUN": str(paths.run)}
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, env=env, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "report.tar.gz").exists()
    names = {
        name.strip() for row in re.findall(r"^\| \w+ \| (.*;.*) \|$", text, re.MULTILINE) for name in row.split(";")
    }
    assert {re.sub(r" \(.*\)$", "", name) for name in names} == {one.name for one in known_causes()}


def test_the_result_and_the_last_words_name_it(paths: RunPaths) -> None:
    result = finish(paths, code=1)
    assert json.loads(paths.result.read_text())["cause"]["name"] == "out of memory on the GPU"
    assert summary(result, paths).splitlines()[3:6] == [
        "  log: l",
        "  cause: out of memory on the GPU",
        f"  fix: {FIX}",
    ]


def test_a_message_with_a_fix_of_its_own_keeps_it(tmp_path: Path) -> None:
    paths = begun(tmp_path)
    record(paths, "node-1", code=78, why="n2 has another image\n  fix:    use one image", last_lines=[])
    assert summary(finish(paths, code=1), paths).splitlines()[1:5] == [
        "  fix:    use one image", "  log: l", "  cause: the configuration is wrong", f"run folder: {paths.run}",
    ]  # fmt: skip


@pytest.mark.seconds
def test_slurm_s_own_lines_are_evidence(tmp_path: Path) -> None:
    paths = begun(tmp_path)
    record(paths, "rank-3", code=137, why="killed by SIGKILL", last_lines=["step 5"])
    line = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks have been OOM Killed."
    paths.node_log(1).write_text(f"slurmstepd: error: *** STEP 17.0 ON n1 CANCELLED AT 2026 ***\n{line}\n")
    result = finish(paths, code=1)
    assert result.cause
    assert (result.cause.name, result.cause.evidence) == ("out of memory on the host", [f"Slurm: {line}"])
    paths.node_log(1).unlink()
    unknown = finish(paths, code=1)
    assert unknown.cause
    assert unknown.cause.name == "unknown"
    assert "cause:" not in summary(unknown, paths)
    assert "  cause: unknown\n" in dray(paths.run).stdout


class TestStates:
    """Whatever state a run is in, it is told, and nothing is changed."""

    def test_done(self, tmp_path: Path) -> None:
        paths = write(read_recipe(None, command=["true"]), FACTS, runs=tmp_path, run="mine")[1]
        finish(paths, code=0)
        assert page(paths.run) == ["mine, attempt 1: done, nothing failed", f"run folder: {paths.run}"]

    @pytest.mark.parametrize(
        ("reason", "name"),
        [("the time limit", "time limit"), ("preemption", "preemption"), ("scancel", "cancelled"),
         ("a node failure", "node failure"), ("Ctrl-C", "asked to end"), ("SIGSYS", None)],
    )  # fmt: skip
    def test_stopped(self, paths: RunPaths, reason: str, name: str | None) -> None:
        finish(paths, code=143, stopped=Stop(reason, "2026-11-24T05:00:00Z"))
        lines = page(paths.run)
        assert lines[0] == f"mine, attempt 1: stopped by {reason} at 2026-11-24T05:00:00Z, exit code 143"
        assert [line for line in lines if line.startswith("  cause:")] == ([f"  cause: {name}"] if name else [])
        assert not any("first to fail" in line for line in lines)  # what ranks die of then is no cause

    @pytest.mark.seconds
    def test_a_job_that_ended_before_its_first_attempt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MY_TOKEN", "a token of my own")
        slurm = Slurm(tmp_path, monkeypatch)
        slurm.lists()
        run = tmp_path / "queued"
        run.mkdir()
        (run / "job.json").write_text(json.dumps({"job": 17, "time": 1.0, "argv": ["sbatch"]}))
        (run / "job-17.log").write_text("x\n" * 99 + "dray: no image\x1b[2J\nMY_TOKEN=a token of my own\n")
        lines = page(run)
        why_ = "job 17 ended before its first attempt: see its output, job-17.log"
        assert lines[0] == f"queued: lost: {why_}"
        assert lines[-3:] == [
            "  job-17.log: dray: no image\\u001b[2J",
            "  job-17.log: MY_TOKEN=[MY_TOKEN]",
            f"run folder: {run}",
        ]
        assert len(lines) < 20
        out = tmp_path / "x.tar.gz"
        assert dray(run, out, "--bundle", PATH=os.environ["PATH"]).returncode == 0
        with tarfile.open(out) as packed:
            assert {"job-17.log", "why.txt"} <= {name.rpartition("/")[2] for name in packed.getnames()}
        refused = command.dray("report", run, cwd=tmp_path)
        assert (refused.returncode, refused.stderr.splitlines()[0]) == (78, "dray: the run has no such attempt")

    def test_a_job_that_waits_for_its_first_attempt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Slurm(tmp_path, monkeypatch).has(17, "PENDING", submitted="1970-01-01T00:00:01")
        run = tmp_path / "queued"
        run.mkdir()
        (run / "job.json").write_text(json.dumps({"job": 17, "time": 1.0, "argv": ["sbatch"]}))
        assert page(run)[0] == "queued: queued: it waits in the queue"

    @pytest.mark.seconds
    @pytest.mark.parametrize("verb", ["why", "status", "stop", "report"])
    def test_an_attempt_that_there_is_not(self, paths: RunPaths, verb: str) -> None:
        refused = command.dray(verb, paths.run / "attempt-9", cwd=paths.run)
        assert refused.returncode == 78
        assert refused.stderr == (
            f"dray: the run has no such attempt\n  where:  {paths.run}/attempt-9\n  wanted: attempt-1\n"
            f"  found:  it does not exist\n  fix:    dray why {shlex.quote(str(paths.run))}\n"
        )

    def test_no_result_yet(self, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        os.utime(paths.plan, (1, 1))
        lines = page(paths.run)
        assert lines[0] == "mine, attempt 1: no result: it is active, or was killed before it could write a result"
        assert lines[1] == "first to fail: rank 3 on n2: exit code 3"
        assert "  cause: out of memory on the GPU" in lines

    @pytest.mark.parametrize(
        ("job", "state", "does"),
        [("RUNNING", "running", "it has no result yet"), ("PENDING", "queued", "it waits in the queue"),
         ("", "lost", "it was killed before it could write a result")],
    )  # fmt: skip
    def test_what_it_does_now(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, state: str, does: str
    ) -> None:
        slurm, paths = Slurm(tmp_path, monkeypatch), begun(tmp_path, "train.steps=60")
        os.utime(paths.plan, (time.time() - 60,) * 2)
        paths.metrics.write_text('{"event": "step", "time": 1, "step": 2, "loss": 5}\n')
        (slurm.folder / "scontrol").write_text("ClusterName = local\n")
        paths.facts.write_text(f"{paths.facts.read_text()}cluster=local\n")
        if job:
            slurm.has(17, job)
        report = why.look(paths)
        assert page(paths.run)[0] == f"mine, attempt 1: {state}: {does}"
        assert (report.status, report.now) == (state, does)
        finish(paths, code=1)
        assert why.look(paths).now == ""

    @pytest.mark.parametrize(
        ("state", "name"),
        [("TIMEOUT", "time limit"), ("CANCELLED by 1000", "cancelled"), ("NODE_FAIL", "node failure"),
         ("RUNNING", None), ("OUT_OF_MEMORY", "out of memory on the host"), ("", None), ("\x1b[2J", None)],
    )  # fmt: skip
    def test_no_result_and_slurm_tells(self, tmp_path: Path, monkeypatch, state: str, name: str | None) -> None:
        """sacct's own interface, by a small program."""
        paths = begun(tmp_path)
        fake = tmp_path / "bin" / "sacct"
        fake.parent.mkdir()
        fake.write_text(f"#!/bin/sh\necho \"$*\" >{tmp_path}/argv\nprintf '%s\\n' '{state}'\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
        lines = page(paths.run)
        assert (tmp_path / "argv").read_text() == "-X -n -P --jobs=17 --format=State\n"
        told = [line for line in lines if line.startswith(("  cause:", "  Slurm:"))]
        shown = state.replace("\x1b", "\\u001b")
        assert told == [*([f"  cause: {name}"] if name else []), *([f"  Slurm: job 17: {shown}"] if state else [])]

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        ("line", "asked", "reason", "name"),
        [
            ("JOB 17 ON n1 CANCELLED AT 2026-11-26T21:05:11 ***", "", "scancel", "cancelled"),
            ("JOB 17 ON n1 CANCELLED AT 2026-11-26T21:05:11 ***", "USR1\ndray stop\n", "dray stop", "asked to end"),
            ("STEP 17.0 ON n1 CANCELLED AT 2026-11-26T21:05:11 ***", "USR1\n", "scancel", "cancelled"),
            ("JOB 17 ON n1 CANCELLED AT 2026-11-26T21:05:11 DUE TO TIME LIMIT ***", "", "the time limit", "time limit"),
            ("STEP 17.0 ON n1 CANCELLED AT 2026-11-26T21:05:11 DUE TO PREEMPTION ***", "", "preemption", "preemption"),
        ],
    )
    @pytest.mark.parametrize("with_slurm", [True, False])
    def test_killed_before_it_could_write_a_result(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, asked: str, reason: str, name: str,
        *, with_slurm: bool,
    ) -> None:  # fmt: skip
        """Slurm's line in the job's log tells it, also where this machine has no Slurm and all was written just now."""
        if with_slurm:
            slurm = Slurm(tmp_path, monkeypatch)
            (slurm.folder / "scontrol").write_text("ClusterName = local\n")
        else:
            monkeypatch.setenv("PATH", "/nowhere")
        paths = begun(tmp_path / "runs")
        paths.facts.write_text(f"{paths.facts.read_text()}cluster=local\n")
        record(paths, "rank-3", why="killed by SIGKILL", code=137)
        paths.stop.write_text(asked)
        paths.node_log(0).touch()
        log = paths.run / "job-17.log" if line.startswith("JOB") else paths.node_log(0)
        log.write_text(f"slurmstepd: error: *** {line}\n")
        cancelled = time.mktime((2026, 11, 26, 21, 5, 11, 0, 0, -1))
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(cancelled))
        os.utime(paths.plan, (cancelled + 60,) * 2)
        other = "lost" if with_slurm else "running"
        before = {"": other, "USR1\n": other, "USR1\ndray stop\n": "stopped" if with_slurm else other}
        assert status_of(paths.run).state == before[asked]  # it ended an earlier attempt of the job
        os.utime(paths.plan, (cancelled - 60,) * 2)
        lines = page(paths.run)
        assert lines[:2] == [
            f"mine, attempt 1: stopped by {reason} at {at}, before it could write a result",
            f"  cause: {name}",
        ]
        seen = status_of(paths.run, closely=True)
        assert (seen.state, seen.why, seen.finished) == ("stopped", reason, at)
        assert "before it could write a result" in "\n".join(status_text(seen))

    @pytest.mark.parametrize(
        ("log", "of", "reason"),
        [
            ("job-20.log", 20, "scancel"),
            ("job-17_3.log", 20, "scancel"),  # the task of an array
            ("job-17.log", 20, "scancel"),  # a job that follows another one, whose log it goes on with
            ("job-19.log", 19, None),  # another job of the run
        ],
    )
    def test_the_log_of_its_own_job(self, tmp_path: Path, log: str, of: int, reason: str | None) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S")
        (tmp_path / log).write_text(f"slurmstepd: error: *** JOB {of} ON n1 CANCELLED AT {at} ***\n")
        found = stop_in_logs(tmp_path / "attempt-1", 20, time.time() - 60)
        assert (found.reason if found else None) == reason

    def test_what_slurm_tells_of_a_requeued_job_is_the_later_attempt_s(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slurm, first = Slurm(tmp_path, monkeypatch), begun(tmp_path / "runs")
        (slurm.folder / "scontrol").write_text("ClusterName = local\nJobId=17 JobState=CANCELLED Reason=None\n")
        os.utime(first.plan, (1, 1))
        begun(tmp_path / "runs")
        report = why.look(first)
        assert (report.status, report.reason, report.evidence) == ("lost", None, [])
        assert why.look(RunPaths(first.run, 2)).reason == "scancel"

    def test_a_log_that_is_a_broken_link(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Slurm(tmp_path, monkeypatch)
        run = tmp_path / "mine"
        run.mkdir()
        (run / "job.json").write_text(json.dumps({"job": 17, "time": 1.0, "argv": ["sbatch"]}))
        (run / "job-17.log").write_text("it ends here\n")
        (run / "job-16.log").symlink_to("gone")
        assert why.of(run)[1].evidence[-1] == "job-17.log: it ends here"

    def test_sigterm_and_then_silence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A bare sbatch's log is in no run folder; what its script heard is. Nothing else tells, where Slurm is not."""
        monkeypatch.setenv("PATH", "/nowhere")
        paths = begun(tmp_path / "runs")
        paths.stop.write_text("TERM\n")
        assert status_of(paths.run).state == "running"  # it may be saving
        for path in (paths.plan, paths.stop):
            os.utime(path, (time.time() - 130,) * 2)
        seen = status_of(paths.run)
        assert (seen.state, seen.why) == ("stopped", "SIGTERM")
        lines = page(paths.run)
        assert lines[0] == f"mine, attempt 1: stopped by SIGTERM at {seen.finished}, before it could write a result"
        assert lines[1] == "  cause: asked to end"

    def test_the_controller_tells_where_nothing_is_accounted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slurm, paths = Slurm(tmp_path, monkeypatch), begun(tmp_path / "runs")
        os.utime(paths.plan, (1, 1))
        paths.stop.write_text("TERM\n")
        (slurm.folder / "scontrol").write_text("ClusterName = local\nJobId=17 JobState=CANCELLED Reason=None\n")
        paths.facts.write_text(f"{paths.facts.read_text()}cluster=local\n")
        lines = page(paths.run)
        assert lines[0].startswith("mine, attempt 1: stopped by scancel at ")
        assert "  Slurm: job 17: CANCELLED" in lines

    def test_earlier_attempts_and_restarts(self, tmp_path: Path) -> None:
        first = begun(tmp_path)
        first.metrics.write_text('{"event": "step", "step": 7, "loss": 1.5}\n')
        finish(first, code=143, stopped=Stop("the time limit", "2026-11-24T05:00:00Z"))
        begun(tmp_path)
        third = begun(tmp_path)
        (third.failures / "restart-1").mkdir()
        (third.failures / "restart-1" / "rank-1.json").write_text(json.dumps(RECORD))
        record(third, "rank-3")
        finish(third, code=1)
        lines = page(tmp_path / "mine")
        assert lines[0] == "mine, attempt 3: failed, exit code 3"
        assert "restarts: 1, first after rank 3 on n2: exit code 3" in lines
        assert "attempt 1: stopped, the time limit, step 7" in lines
        assert "attempt 2: unknown, it left no result" in lines

    def test_an_attempt_without_a_plan(self, paths: RunPaths) -> None:
        finish(paths, code=1)
        paths.plan.unlink()
        assert page(paths.run)[0] == "mine, attempt 1: failed, exit code 3"
        paths.result.unlink()
        assert any(line.startswith(f"warning: {paths.plan} cannot be read: ") for line in page(paths.run))

    def test_it_changes_nothing(self, paths: RunPaths) -> None:
        before = sorted((str(path), path.stat().st_mtime_ns) for path in paths.run.rglob("*"))
        page(paths.run)
        assert sorted((str(path), path.stat().st_mtime_ns) for path in paths.run.rglob("*")) == before


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["gone"], 78, "there is no such run"),
        (["file"], 78, "this is not a run folder"),
        (["queued"], 78, "this is not a run folder"),
        (["--runs", "gone"], 78, "there are no runs"),
        (["--runs", "queued"], 78, "there are no runs"),
        (["queued", "x.tar.gz"], 78, "FILE needs --bundle"),
        (["queued", "--bundle", "--json", "--on", "far"], 78, "--json and --bundle exclude each other"),
        (["x" * 300], 78, "there is no such run"),
        (["a", "b", "c"], 78, "got unexpected extra argument(s) (c)"),
    ],
)
@pytest.mark.hostile("why")
def test_what_is_no_run(tmp_path: Path, words: list[str], code: int, problem: str) -> None:
    (tmp_path / "queued").mkdir()
    (tmp_path / "file").touch()
    ended = dray(*words, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.splitlines()[0]) == (code, "", f"dray: {problem}")


@pytest.mark.seconds
@pytest.mark.hostile("why")
def test_what_no_terminal_should_be_sent(paths: RunPaths) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\u0000\ud800" + "x" * 100_000
    record(
        paths, "rank-3", why=evil, node=evil, log=evil, last_lines=[evil] * 500, evidence=[evil, 5, None, [evil]] * 99
    )
    for result in (None, finish(paths, code=1)):
        if result:
            paths.result.write_text(paths.result.read_text().replace('"mine"', '"\\u001b[2J"'))
        ended = dray(paths.run)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "\x1b" not in ended.stdout
        assert len(ended.stdout) < 20_000
        assert "\x1b" not in dray(paths.run, "--json").stdout


@pytest.mark.seconds
@pytest.mark.hostile("why")
def test_a_log_of_gigabytes_and_of_one_line(paths: RunPaths) -> None:
    (paths.failures / "rank-3.json").write_text("{")
    with paths.rank_log(3).open("wb") as log:
        log.truncate(8 << 30)  # a sparse file of NULs
    ended = dray(paths.run)
    assert (ended.returncode, len(ended.stdout) < 10_000) == (0, True)


@pytest.mark.seconds
@pytest.mark.hostile("why")
def test_another_user_s_folder_that_may_not_be_read(paths: RunPaths) -> None:
    paths.run.chmod(0)
    # Root reads all; what is imported before is in nobody's reach after.
    code = (
        "import os, sys, dray.cli.report, dray.runs.prepare, dray.runs.report.archive, dray.runs.report.why\n"
        "if not os.geteuid(): os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "dray.cli.main()"
    )
    argv = [sys.executable, "-c", code, "why", str(paths.run)]
    env = {**PYTHON, "HOME": "/nonexistent"}
    ended = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, timeout=60, check=False)
    paths.run.chmod(0o700)
    assert (ended.returncode, ended.stdout) == (78, "")
    assert "Traceback" not in ended.stderr
