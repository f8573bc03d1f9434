"""What `dray run` shows, on a terminal and in a pipe: what a command's first rank prints, a recipe's steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dray.cli.run import Progress
from dray.planning.schema import Plan
from dray.runs import local, prepare
from dray.runs.store import RunPaths
from helpers import ROOT, runs, until


class Terminal:
    """A terminal, and what has been shown on it."""

    def __init__(self) -> None:
        self.shown, (self._master, self.slave) = b"", os.openpty()

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def until(self, text: bytes) -> None:
        while text not in self.shown:
            assert self._more(), self.shown

    def rest(self) -> str:
        """All of it, without what moves the cursor; the other side is closed."""
        while self._more():
            pass
        os.close(self._master)
        return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", self.shown.decode(errors="surrogateescape")).replace("\r\n", "\n")

    def _more(self) -> bytes:
        try:
            found = os.read(self._master, 65536)
        except OSError:  # nobody has the other side open any more
            return b""
        self.shown += found
        return found


DRAY = ("env", "--default-signal=INT", sys.executable, "-m", "dray", "run", "launcher=python", "name=talk")
# The last byte of its first line is no UTF-8, and its last line has no end. It waits until it was heard.
TALK = r"""
trap 'echo told to end; exit 1' TERM
printf 'hello \303\n'
while [ ! -e go ]; do sleep 0.02; done
printf bye
"""


@contextmanager
def on_a_terminal(folder: Path, *words: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    terminal = Terminal()
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    with subprocess.Popen(["setsid", "--ctty", *DRAY, *words], cwd=folder, **ends) as started:
        os.close(terminal.slave)
        try:
            yield terminal, started
        finally:
            started.kill()


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").glob("[!.]*")
    return run


@pytest.mark.seconds
@pytest.mark.torch
def test_a_command_is_on_the_terminal_as_it_speaks(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path, "--", "sh", "-c", TALK) as (terminal, started):
        terminal.until(b"hello \xc3\r\n")
        (tmp_path / "go").touch()
        shown = terminal.rest()
        assert started.wait(60) == 0
    run = run_of(tmp_path)
    assert shown == (
        f"run folder: {run}\ntalk: 1 rank on 1 node (bare)\nhello \udcc3\nbye\n"
        f"done: exit code 0, 1 rank on node1\nrun folder: {run}\n"
    )
    assert (run / "attempt-1" / "logs" / "rank-0.log").read_bytes() == b"hello \xc3\nbye"


@pytest.mark.seconds
@pytest.mark.torch
def test_a_command_is_in_a_pipe_as_it_speaks(tmp_path: Path) -> None:
    argv = [*DRAY, "ranks_per_node=2", "--", "sh", "-c", f"[ $RANK = 0 ] || exec echo other\n{TALK}"]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as started:
        assert started.stdout
        seen = [started.stdout.readline() for _ in range(3)]
        (tmp_path / "go").touch()
        rest = started.stdout.read()
    run = run_of(tmp_path)
    assert (started.returncode, b"".join(seen) + rest) == (
        0,
        f"run folder: {run}\n"
        "talk: 2 ranks on 1 node (bare); rank 0 is shown here, the logs of all are in attempt-1/logs\n".encode()
        + b"hello \xc3\nbye\n"
        + f"done: exit code 0, 2 ranks on node1\nrun folder: {run}\n".encode(),
    )


@pytest.mark.torch
def test_a_reader_that_leaves_does_not_end_a_run(tmp_path: Path) -> None:
    argv = [*DRAY, "--", "sh", "-c", TALK]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as started:
        assert started.stdout
        assert started.stdout.readline().startswith(b"run folder: ")
        started.stdout.close()
        (tmp_path / "go").touch()
    assert json.loads((run_of(tmp_path) / "attempt-1" / "result.json").read_text())["status"] == "done"


@pytest.mark.seconds
@pytest.mark.torch
def test_ctrl_c_ends_a_command_in_words(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path, "--", "sh", "-c", TALK) as (terminal, started):
        terminal.until(b"hello")
        terminal.type(b"\x03")
        shown = terminal.rest()
        assert started.wait(60) == 130
    assert "stopping: ranks get a few seconds to end by themselves; Ctrl-C again ends them at once\n" in shown
    assert "told to end\n" in shown
    assert shown.count("run folder: ") == 2
    safe = "  safe:   what the command itself saved\n"
    again = f"  again:  {shlex.quote(sys.executable)} -m dray run launcher=python name=talk"
    stopped, _, rest = shown.partition("stopped by Ctrl-C at ")[2].partition("\n")
    run = run_of(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", stopped)
    assert rest == f"{safe}{again} --run={run.name} -- sh -c {shlex.quote(TALK)}\nrun folder: {run}\n"


@pytest.mark.slow
@pytest.mark.torch
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    """And leaves nothing of the ranks, which do not hear SIGTERM."""
    deaf = "trap '' TERM; echo pid $$ is deaf; while :; do sleep 1; done"
    with on_a_terminal(tmp_path, "--", "sh", "-c", deaf) as (terminal, started):
        terminal.until(b"deaf\r\n")
        terminal.type(b"\x03")
        terminal.until(b"stopping")
        terminal.type(b"\x03")
        shown = terminal.rest()
        assert started.wait(60) == 130
    (pid,) = re.findall(r"^pid (\d+) is deaf$", shown, re.MULTILINE)
    until(lambda: not runs(pid))


START = {"event": "start", "steps": 60, "first_step": 0}
FOUND = {"loss": 2.0, "perplexity": 7.389, "accuracy": 0.5}


def step(number: int) -> dict:
    return {"event": "step", "step": number, "loss": 1.5, "tokens_per_s": 1234.5, "seconds_left": 7.6}


def evaluation(event: str, number: int, **other: float | None) -> dict:
    return {"event": event, "step": number, **FOUND, **other}


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Plan, RunPaths]:
    recipe = prepare.read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["train.steps=60"])
    facts = local.facts(recipe, engine="bare", image=sys.executable, nodes=2, gpus_per_node=0, site="")
    return prepare.write(recipe, facts, runs=tmp_path, run="a")


def say(paths: RunPaths, *events: dict) -> None:
    with paths.metrics.open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


def test_steps_and_evaluations_are_lines(planned: tuple[Plan, RunPaths], capsys) -> None:
    plan, paths = planned
    with Progress(plan, paths) as progress:
        progress.update()  # nothing is there yet
        say(paths, {**START, "first_step": 40}, step(50), evaluation("eval", 50), evaluation("eval-far-off", 50))
        progress.update()
        say(
            paths,
            step(60),
            evaluation("eval", 60),
            evaluation("test", 60, loss=None, perplexity=None),
            {"event": "end"},
        )
        with paths.metrics.open("a") as file:
            file.write('{"event": "st')
    figures = "loss 1.500  1,234 tokens/s  7 s left"
    assert capsys.readouterr().out == (
        f"run folder: {paths.run}\n"
        "smoke-cpu: 4 ranks on 2 nodes (bare)\n"
        "resumed at step 40 of 60\n"
        f"step 50  {figures}\n"
        "evaluation at step 50  loss 2.000  perplexity 7.39  accuracy 0.500\n"
        "evaluation far-off at step 50  loss 2.000  perplexity 7.39  accuracy 0.500\n"
        f"step 60  {figures}\n"
        "evaluation at step 60  loss 2.000  perplexity 7.39  accuracy 0.500\n"
        "test at step 60  loss not finite  perplexity not finite  accuracy 0.500\n"
    )


def test_a_hostfile_s_other_machine_shows_its_own_first_rank(planned: tuple[Plan, RunPaths], capsys) -> None:
    plan, paths = planned
    with Progress(plan, paths, 1):
        paths.rank_log(2).write_text("step 1/60\n")
    head, middle, last = capsys.readouterr().out.splitlines()
    assert (head, last) == (f"run folder: {paths.run}", "step 1/60")
    assert middle.endswith("; rank 2 is shown here, the logs of all are in attempt-1/logs")
