"""Files that grow under a look are read on from where the last one ended: no line twice, and none left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.facts import Facts
from dray.runs.active_run.logs import Growing, Log
from dray.runs.metrics import tail
from dray.runs.prepare import read_recipe, write
from dray.runs.status import Watched
from dray.runs.store import RunPaths
from helpers import ROOT

SLOW = '{"event": "slow", "time": 5.0, "step": %d, "rank": 1, "node": "n1", "times": 1.5}\n'
STEP = '{"event": "step", "time": 5.0, "step": %d, "loss": 2.5}\n'


def begun(runs: Path) -> RunPaths:
    facts = Facts(scheduler="slurm", job=51, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")
    return write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ()), facts, runs=runs, run="mine")[1]


def notes(watched: Watched) -> list[str]:
    live = watched.look(closely=True).live
    assert live
    return [note for note in live.notes if note.startswith("slow: ")]


def test_a_look_at_a_run_reads_the_end_of_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that of the next attempt's."""
    monkeypatch.setenv("PATH", "/nowhere")
    paths = begun(tmp_path)
    paths.metrics.write_text(SLOW % 6 + "".join(STEP % step for step in range(2000)) + SLOW % 7)
    watched = Watched(paths.run)
    assert len(notes(watched)) == 1  # the first is 100 kB before the end
    with paths.metrics.open("a") as file:
        file.write(SLOW % 8)
    assert len(notes(watched)) == 2
    after = begun(tmp_path)
    after.metrics.write_text(SLOW % 9)
    assert len(notes(watched)) == 1


def again(path: Path, text: str) -> None:
    """Another file of that name."""
    (path.parent / "new").write_text(text)
    (path.parent / "new").replace(path)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda path: path.write_text("a\nb\nc\n"), [b"c\n"]),
        (lambda path: None, []),
        (lambda path: path.write_text("x\n"), [b"x\n"]),  # cut, and written anew
        (lambda path: path.write_text(""), []),
        (lambda path: again(path, "a\nb\n"), [b"a\n", b"b\n"]),
        (lambda path: path.unlink(), None),
    ],
)
def test_what_may_have_become_of_a_file(
    tmp_path: Path, change: Callable[[Path], object], lines: list[bytes] | None
) -> None:
    path = tmp_path / "file"
    path.write_text("a\nb\n")
    file = Growing(path)
    assert list(file.lines(100)) == [b"a\n", b"b\n"]
    change(path)
    if lines is None:
        with pytest.raises(FileNotFoundError):
            list(file.lines(100))
        path.write_text("n\n")
        lines = [b"n\n"]
    assert list(file.lines(100)) == lines
    with path.open("a") as more:
        more.write("last\n")
    assert list(file.lines(100)) == [b"last\n"]


def test_a_disk_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a\n")
    file = Growing(tmp_path / "file")
    file.position = -1
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises((OSError, ValueError)) as failed:
        list(file.lines(100))
    assert len([*Path("/proc/self/fd").iterdir()]) == before, failed


def test_a_line_that_is_half_written(tmp_path: Path) -> None:
    """Neither lost nor read twice; one that is too long comes in pieces."""
    path = tmp_path / "file"
    path.write_text("a\nhal")
    file = Growing(path)
    assert list(file.lines(100)) == [b"a\n"]
    assert list(file.lines(100)) == []
    with path.open("a") as more:
        more.write("f\n" + "0123456789" * 2 + "\nx")
    assert list(file.lines(10)) == [b"half\n", b"0123456789", b"0123456789", b"\n"]
    assert list(file.lines(10, whole=True)) == [b"x"]


def test_a_log_that_is_cut_is_shown_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("a long first line\nb\n")
    log = Log(path, "rank", "0", 0)
    assert list(log.new()) == [b"a long first line", b"b"]
    path.write_text("c\n")
    assert list(log.new()) == [b"c"]
    again(path, "d\n")
    with path.open("a") as more:
        more.write("e\n")
    assert list(log.new()) == [b"d", b"e"]


@pytest.mark.parametrize("nodes", [2, 1000, 50_000])
def test_the_last_step_is_found_however_long_its_line_is(tmp_path: Path, nodes: int) -> None:
    """A step of ten thousand nodes has 100 kB."""
    path = tmp_path / "metrics.jsonl"
    step = {"event": "step", "time": 1.0, "step": 3, "node_s": [0.125] * nodes}
    rest = '{"event": "eval", "time": 1.0}\n' * 200
    path.write_text(f'{{"event": "start"}}\n{STEP % 2}{json.dumps(step)}\n{rest}{{"event": "step", "ti')
    assert [event["step"] for event in tail(path) if event["event"] == "step"][-1] == 3
    assert [event["event"] for event in tail(path)][-1] == "eval"
    path.write_text("\n")
    assert (tail(path), tail(tmp_path / "none")) == ([], [])
