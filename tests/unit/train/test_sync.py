"""`dray report --sync`: what a run has logged goes to a tracker's server, each step once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dray.contract.findings import DrayError
from dray.contract.trainer import image_tasks
from dray.train.loop import trackers
from dray.train.loop.trackers import KINDS, Kind
from dray.train.outputs import sync

pytest.importorskip("accelerate", reason="torch: the training stack is not installed (make demo installs it)")
pytestmark = pytest.mark.torch


class Server:
    def __init__(self, lines: list, wrong: list) -> None:
        self.lines, self.wrong = lines, wrong

    def start(self) -> None: ...

    def log(self, values: dict, step: int) -> None:
        self.lines.append((step, values["step/loss"]))

    def finish(self) -> None:
        if self.wrong:
            raise OSError(self.wrong.pop())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    for name in ("one", "two"):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Server)
    monkeypatch.setattr(trackers, "find_spec", lambda _: True)
    lines, wrong = list[tuple](), list[str]()
    kind = Kind(lambda _: {"lines": lines, "wrong": wrong}, {}, {}, ("TEST_SERVER",))
    monkeypatch.setitem(KINDS, "one", kind)
    monkeypatch.setenv("TEST_SERVER", "here")
    return lines, wrong


def attempt(run: Path, number: int, *steps: int, tail: str = "", requeue: bool | None = None) -> None:
    folder = run / f"attempt-{number}"
    folder.mkdir(parents=True)
    lines = [json.dumps({"event": "step", "step": step, "loss": float(number)}) + "\n" for step in steps]
    (folder / "metrics.jsonl").write_text("".join(lines) + tail)
    if requeue is not None:
        (folder / "result.json").write_text(json.dumps({"next": {"requeue": True} if requeue else None}))


def sent(run: Path, *, follow: bool = False) -> None:
    sync.run(image_tasks.Sync(str(run), "r", "p", ["one"], follow))


def test_each_step_is_sent_once_as_the_last_attempt_has_it(server, tmp_path: Path, capsys) -> None:
    lines, _ = server
    attempt(tmp_path, 1, 1, 2, 3, tail='{"event": "st')
    attempt(tmp_path, 2, 3, 4)
    sent(tmp_path)
    attempt(tmp_path, 3, 4, 5)
    sent(tmp_path)
    assert lines == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 3.0)]
    assert capsys.readouterr().out == "one: 4 lines of metrics sent\none: 1 line of metrics sent\n"


def test_what_a_server_has_not_taken_is_sent_again(server, tmp_path: Path) -> None:
    lines, wrong = server
    attempt(tmp_path, 1, 1)
    wrong.append("no route to hf_" + "a" * 34)
    with pytest.raises(DrayError, match=r"found:  no route to \[secret\]"):
        sent(tmp_path)
    sent(tmp_path)
    assert lines == [(1, 1.0), (1, 1.0)]


def test_a_server_that_fails_makes_no_other_get_lines_twice(server, tmp_path: Path, monkeypatch) -> None:
    lines, wrong = server
    taken = list[tuple]()
    monkeypatch.setitem(KINDS, "two", KINDS["one"]._replace(options=lambda _: {"lines": taken, "wrong": []}))
    attempt(tmp_path, 1, 1)
    wrong.append("no route")
    job = image_tasks.Sync(str(tmp_path), "r", "p", ["one", "two"], follow=False)
    with pytest.raises(DrayError, match="the metrics cannot be sent to one"):
        sync.run(job)
    sync.run(job)
    assert (lines, taken) == ([(1, 1.0), (1, 1.0)], [(1, 1.0)])


def test_a_secret_at_the_end_of_a_long_message_is_redacted(server, tmp_path: Path) -> None:
    attempt(tmp_path, 1, 1)
    server[1].append("x" * 385 + " hf_" + "a" * 34)
    with pytest.raises(DrayError) as refused:
        sent(tmp_path)
    assert refused.value.finding.found == "x" * 385 + " [secret]"


def test_it_follows_a_run_into_its_next_attempt(server, tmp_path: Path, monkeypatch) -> None:
    lines, _ = server
    attempt(tmp_path, 1, 1, 2, requeue=True)
    later = iter(
        (lambda: attempt(tmp_path, 2, 3), lambda: (tmp_path / "attempt-2/result.json").write_text('{"next": null}'))
    )
    monkeypatch.setattr(sync.time, "sleep", lambda _: next(later)())
    sent(tmp_path, follow=True)
    assert lines == [(1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one", "one needs the address of its server\n  wanted: TEST_SERVER\n"),
        ("tensorboard", "tensorboard has no server\n"),
    ],
)
def test_a_tracker_without_a_server_is_refused(server, tmp_path: Path, monkeypatch, name: str, message: str) -> None:
    monkeypatch.delenv("TEST_SERVER")
    with pytest.raises(DrayError, match=message):
        sync.run(image_tasks.Sync(str(tmp_path), "r", "p", [name], follow=False))
