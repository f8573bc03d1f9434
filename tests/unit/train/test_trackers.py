"""Trackers get each step of a run once, hold nothing up, and end nothing."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from threading import Event
from typing import get_args

import pytest

from dray.config.training import Tracker
from dray.train.loop import trackers
from dray.train.loop.trackers import KINDS, Kind, Tracked, Trackers, numbers

pytest.importorskip("accelerate", reason="torch: the training stack is not installed (make demo installs it)")
pytestmark = pytest.mark.torch


class Kept:
    """A tracker that keeps what it gets; `go` holds its start up, `wrong` is raised at this step."""

    def __init__(self, lines: list, go: Event | None = None, wrong: BaseException | None = None) -> None:
        self.lines, self.go, self.wrong = lines, go, wrong

    def start(self) -> None:
        if self.go:
            assert self.go.wait(20)

    def log(self, values: dict, step: int) -> None:
        if self.wrong:
            raise self.wrong
        self.lines.append((step, values))

    def finish(self) -> None:
        self.lines.append("finished")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    monkeypatch.setattr(trackers, "at_end", lambda _: None)

    def add(name: str, **given) -> list:
        lines: list = []
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Kept)
        monkeypatch.setitem(KINDS, name, Kind(lambda _: {"lines": lines, **given}, {}, {}))
        return lines

    return add


def step(number: int, loss: float = 1.0) -> dict:
    return {"event": "step", "time": 1.5, "step": number, "loss": loss}


def written(run: Path, attempt: int, *lines: dict | str) -> None:
    folder = run / f"attempt-{attempt}"
    folder.mkdir(parents=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def test_the_recipe_has_accelerates_names() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert set(KINDS) == set(get_args(Tracker)) <= set(LOGGER_TYPE_TO_CLASS)


@pytest.mark.parametrize("name", sorted({*KINDS} - {"mlflow"}))  # which is asked for its run
def test_accelerates_class_takes_the_options(name: str, tmp_path: Path) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    inspect.signature(LOGGER_TYPE_TO_CLASS[name]).bind(**KINDS[name].options(Tracked("p", "r", tmp_path)))


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(kept, tmp_path: Path, capsys) -> None:
    good, bad = kept("good"), kept("bad", wrong=SystemExit("no server for hf_" + "a" * 34))
    both = Trackers(["bad", "good"], Tracked("p", "r", tmp_path / "trackers"))
    for number in (1, 2, 3):
        both.log(step(number))
    both.close()
    assert [line if isinstance(line, str) else line[0] for line in good] == [1, 2, 3, "finished"]
    assert bad == []
    assert capsys.readouterr().out == "WARNING: bad gets no more metrics: no server for [secret]\n"


def test_a_tracker_that_does_not_answer_holds_up_no_step(kept, tmp_path: Path, capsys, monkeypatch) -> None:
    go = Event()
    slow = kept("slow", go=go)
    one = Trackers(["slow"], Tracked("p", "r", tmp_path / "trackers"))
    one.log(step(1))
    monkeypatch.setattr(trackers, "_PATIENCE_S", 0.0)
    (thread,) = one._threads
    one.close()
    assert "slow did not take all metrics" in capsys.readouterr().out
    assert slow == []
    go.set()
    thread.join(20)
    assert slow == [(1, {"step/step": 1, "step/loss": 1.0}), "finished"]


def test_the_next_attempt_goes_on_after_the_last_step_that_was_tracked(kept, tmp_path: Path) -> None:
    """Also after an attempt that was killed while it wrote, and of which only a folder is left."""
    lines = kept("good")
    evaluation = {"event": "eval", "step": 2, "loss": 2.0}
    written(tmp_path, 1, step(1), step(2), evaluation, step(3), '{"event": "st')
    (tmp_path / "attempt-2").mkdir()
    written(tmp_path, 3)
    resumed = Trackers(["good"], Tracked("p", "r", tmp_path / "trackers", first_step=2))
    for event in (evaluation, step(3), step(4), evaluation | {"step": 4}):
        resumed.log(event)
    resumed.close()
    assert [line[0] for line in lines[:-1]] == [4, 4]


def test_tensorboard_shows_the_later_attempts_steps(tmp_path: Path, monkeypatch) -> None:
    from accelerate import PartialState
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(trackers, "at_end", lambda _: None)
    for first, losses in ((0, (1.0, 2.0, 3.0)), (1, (5.0, 6.0))):
        board = Trackers(["tensorboard"], Tracked("p", "r", tmp_path / "trackers", first_step=first))
        for number, loss in enumerate(losses, first + 1):
            board.log(step(number, loss))
        board.close()
    assert PartialState._shared_state == {}  # it would choose a device and a backend
    found = EventAccumulator(str(tmp_path / "trackers/tensorboard")).Reload().Scalars("step/loss")
    assert [(event.step, event.value) for event in found] == [(1, 1.0), (2, 5.0), (3, 6.0)]


def test_a_line_in_numbers() -> None:
    event = step(7) | {"lr": None, "attention_max": [1.0, None], "shares": {"web": 0.5}, "why": "x"}
    assert numbers(event) == {
        "step/step": 7, "step/loss": 1.0, "step/attention_max/0": 1.0, "step/shares/web": 0.5,
    }  # fmt: skip
