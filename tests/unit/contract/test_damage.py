"""Each reader of a file with each damage of it: a clear line, the exit code of the contract, no traceback, no hang.

DRAY_GOLDEN=write writes tests/golden/damage.txt: read the diff then.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import pytest

from damage import (
    CONTENTS,
    DAMAGES,
    JSON,
    NO_FILES,
    PLAIN,
    READERS,
    VALUES,
    VALUES_OF,
    VERBS,
    damaged,
    make_run,
    old,
)  # fmt: skip
from dray import cli
from dray.cli import app
from dray.cli.streams import show
from dray.contract import exit_codes, failures
from dray.contract.run_folder import RESULT
from dray.runs.status import Watched
from dray.runs.store import RunPaths
from helpers import GOLDEN

pytestmark = [pytest.mark.hostile("damage"), pytest.mark.seconds]

PAGE = GOLDEN / "damage.txt"
WRITES = os.environ.get("DRAY_GOLDEN") == "write"
CODES = {exit_codes.DONE, exit_codes.FAILED, 3, exit_codes.UNFIT, exit_codes.RETRY, exit_codes.CONFIG}
"""3 is the failed rank's own."""
LIMIT_S = 60  # only a hang takes so long
OTHERS = NO_FILES.keys() - {"a link to nowhere", "nothing"}
"""What no reader can take for its file, or for none."""
ALL = DAMAGES | VALUES
FILES_ALONE = {"a socket", "a link to nowhere"}
"""A run's verbs are not tried with these."""
GROUPS = {"no file": NO_FILES, "other content": CONTENTS, "other values": VALUES}
SHOWN = ("status RUN", "status GOING", "why RUN", "why GOING")
"""Verbs whose first line is in the table though all is well."""


def of_files() -> Iterator[object]:
    for name, reader in READERS.items():
        marks = [pytest.mark.torch] if reader.torch else []
        for damage in ALL if reader.values else DAMAGES:
            yield pytest.param(name, damage, id=f"{name}-{damage}", marks=marks)


def of_verbs() -> Iterator[object]:
    for line in VERBS.strip().splitlines():
        verb, _, names = line.partition(": ")
        for name in names.split():
            values = name == "all" or (verb.startswith(VALUES_OF) and name in JSON)
            for damage in ALL if values else DAMAGES:
                if damage not in FILES_ALONE:
                    cell = f"{verb}-{name}-{damage}"
                    marks = () if WRITES or crc32(cell.encode()) % 8 == 0 else pytest.mark.slow
                    yield pytest.param(verb, name, damage, id=cell, marks=marks)


class Table:
    """Reader, damage, exit code, first line: the cells of the golden table."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], str] = {}
        for line in () if WRITES else PAGE.read_text().splitlines():
            reader, names, result = line.split(" | ", 2)
            for name in names.split("; "):
                self.cells |= {(reader, damage): result for damage in GROUPS.get(name, (name,))}

    def check(self, reader: str, damage: str, code: int, text: str) -> None:
        result = f"{code} {text}".strip()
        if WRITES:
            self.cells[reader, damage] = result
        assert self.cells.get((reader, damage)) == result

    def text(self) -> str:
        """With the damages of a reader that end alike in one line."""
        rows: dict[str, dict[str, list[str]]] = {}
        for (reader, damage), result in self.cells.items():
            rows.setdefault(reader, {}).setdefault(result, []).append(damage)
        lines = []
        for reader, results in rows.items():
            tried = {damage for damages in results.values() for damage in damages}
            for result, damages in results.items():
                names = [name for name, group in GROUPS.items() if {*group} & tried and {*group} & tried <= {*damages}]
                names += [damage for damage in damages if not any(damage in GROUPS[name] for name in names)]
                lines.append(f"{reader} | {'; '.join(names)} | {result}\n")
        return "".join(lines)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    table = Table()
    yield table
    if WRITES:
        PAGE.write_text(table.text())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run that is as it should be, in a machine without Slurm; the verbs are registered once."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("damage")
        patch.setenv("PATH", "/nowhere")
        patch.setenv("HOME", str(home / "home"))
        patch.setenv("DRAY_RUNS", str(home / "runs"))
        patch.chdir(home)
        patch.setattr(Watched, "unknown_s", 0.0)
        patch.setattr(Watched, "next_s", 0.0)
        patch.setattr(time, "sleep", lambda _seconds: None)
        whole = app.command(*cli.SHOWN, "finish")
        patch.setattr(app, "command", lambda *_: whole)
        make_run(home / "runs", "other")
        yield home


def copied(home: Path) -> RunPaths:
    """A copy of that run."""
    run = home / "runs" / "mine"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(home / "runs" / "other", run, symlinks=True, copy_function=shutil.copy)
    return RunPaths(run)


@contextmanager
def limited() -> Iterator[None]:
    """A hang fails; and no signal handler stays, of which `dray finish` sets some."""

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    numbers = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def shown(text: str, home: Path) -> str:
    """The first line, without what is this run's alone."""
    line = text.partition("\n")[0].replace(str(home), "HOME")
    return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\dZ?)?", "TIME", line)[:120].rstrip()


@pytest.mark.parametrize(("name", "damage"), [*of_files()])
def test_a_damaged_file(name: str, damage: str, tmp_path: Path, home: Path, table: Table) -> None:
    reader = READERS[name]
    in_run = reader.file.startswith("RUN/")
    path = copied(home).run / reader.file.removeprefix("RUN/") if in_run else tmp_path / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(reader.content(path.parent) if callable(reader.content) else reader.content)
    path.chmod(0o600)
    damaged(path, ALL[damage])
    with limited():
        try:
            code, text = exit_codes.DONE, "nothing" if reader.read(path) is None else "read"
        except Exception as raised:
            error = failures.unexpected_error(raised)
            code, text = error.finding.code, error.problem.replace(str(tmp_path), "HOME")
    assert text != failures.DEFECT
    if damage in OTHERS and reader.refuses is not None:
        assert code == exit_codes.CONFIG if reader.refuses else text == "nothing"
    table.check(name, damage, code, shown(text, home))


@pytest.mark.parametrize(("verb", "name", "damage"), [*of_verbs()])
def test_a_damaged_run(
    verb: str, name: str, damage: str, home: Path, table: Table, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = copied(home)
    if "GOING" in verb:
        (run.folder / RESULT).unlink()
    every = JSON if damage in VALUES else PLAIN
    for path in every if name == "all" else ["" if name == "attempt" else name]:
        damaged(run.folder / path, ALL[damage])
    old(run.run)
    words = {
        "RUN": run.run, "GOING": run.run, "ATTEMPT": run.folder, "OTHER": home / "runs" / "other",
        "OUT.html": tmp_path / "OUT.html", "OUT.toml": tmp_path / "OUT.toml", "OUT.tar.gz": tmp_path / "OUT.tar.gz",
    }  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for stream in ("stdout", "stderr"):  # as main does
        monkeypatch.setattr(sys, stream, show(getattr(sys, stream)))
    with limited():
        code = cli._code([str(words.get(word, word)) for word in verb.split()])
    out, err = capfd.readouterr()
    assert code in CODES, err
    for word in (failures.DEFECT, "send a bug report with", "Traceback"):
        assert word not in err
    assert "\x1b" not in (err if verb.startswith("logs") else out + err)
    text = (err or out) if code else out if verb in SHOWN else ""
    table.check(f"{verb}: {name}", damage, code, shown(text, home))
