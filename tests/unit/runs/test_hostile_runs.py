"""Run folders in any state, and each verb that reads one: a clear line, an exit code by contract, no traceback, no end
that does not come."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from damage import make_run, old
from dray import cli
from dray.cli import app
from dray.cli.streams import show
from dray.contract import failures
from dray.runs.status import Watched
from dray.runs.store import RunPaths

pytestmark = pytest.mark.hostile("run folders")

VERBS = tuple(
    tuple(line.split())
    for line in """
runs -n 0
status RUN
status RUN --json
logs RUN
top RUN
why RUN
why RUN --json
why RUN OUT.tar.gz --bundle
stop RUN --no-wait
report RUN --out OUT.html
diff RUN OTHER
diff OTHER RUN
replay RUN --recipe OUT.toml
report RUN --sync
clean
model eval RUN
model generate RUN a
model export RUN
enter RUN -- true
""".strip().splitlines()
)
CODES = {0, 1, 3, 69, 75, 78}
"""3 is the failed rank's own."""
LIMIT_S = 120  # of one call: only a hang takes so long


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run that is as it should be."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DRAY_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs", "other")


@pytest.fixture
def dray_says(
    other: RunPaths, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., list[str]]]:
    """What is wrong with what these verbs say of a run."""
    monkeypatch.setattr(Watched, "unknown_s", 0.0)
    monkeypatch.setattr(Watched, "next_s", 0.0)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    whole = app.command(*cli.SHOWN)  # once, and not for each call
    monkeypatch.setattr(app, "command", lambda *_: whole)

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)

    def said(run: Path, verbs: tuple[tuple[str, ...], ...] = VERBS) -> list[str]:
        wrong = []
        for name in ("stdout", "stderr"):  # as main does
            monkeypatch.setattr(sys, name, show(getattr(sys, name)))
        for verb in verbs:
            words = [{"RUN": str(run), "OTHER": str(other.run)}.get(word, word) for word in verb]
            for name in ("OUT.html", "OUT.tar.gz", "OUT.toml"):
                Path(name).unlink(missing_ok=True)
            old(run) if run.exists() else None
            signal.alarm(LIMIT_S)
            try:
                code = cli._code(words)
            except AssertionError as hung:
                code = str(hung)
            finally:
                signal.alarm(0)
            out, err = capfd.readouterr()
            bad = [word for word in (failures.DEFECT, "send a bug report with", "Traceback") if word in err]
            bad += ["an escape sequence"] if "\x1b" in (err if verb[0] == "logs" else out + err) else []
            bad += ["no line"] if not (out + err).strip() and verb[0] not in ("logs", "enter", "model") else []
            if code not in CODES or bad:
                wrong.append(f"{' '.join(verb)}: {code} {bad} {err[-400:]}")
        return wrong

    yield said
    signal.signal(signal.SIGALRM, before)


def fresh(other: RunPaths) -> RunPaths:
    run = other.run.with_name("mine")
    if run.is_symlink():
        run.unlink()
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(other.run, run, symlinks=True)
    return RunPaths(run)


def test_names_that_no_terminal_should_be_sent(other: RunPaths, dray_says: Callable[..., list[str]]) -> None:
    run = other.run.with_name("a\n\x1b[2J\x1b]0;x\x07 name")
    shutil.copytree(other.run, run, symlinks=True)
    assert dray_says(run) == []


@pytest.mark.seconds
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
def test_a_run_of_another_user_is_shown_and_not_touched(other: RunPaths, dray_says: Callable[..., list[str]]) -> None:
    """Neither asked to end, nor entered, nor removed; as an ordinary user sees root's."""
    paths = fresh(other)
    for path in (paths.run, *paths.run.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert dray_says(paths.run) == []
    assert paths.stop.read_text() == ""


@pytest.mark.slow
def test_a_million_steps(other: RunPaths, dray_says: Callable[..., list[str]]) -> None:
    paths = fresh(other)
    step = '{"event": "step", "time": 1795570009.5, "step": %d, "loss": 2.5, "tokens_per_s": 9.0}\n'
    with paths.metrics.open("w") as file:
        file.writelines(step % number for number in range(1_000_000))
    assert dray_says(paths.run) == []
