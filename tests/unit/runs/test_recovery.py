"""How long a run took to go on: in its result, from its own files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dray.contract import run_folder
from dray.facts import Facts
from dray.runs.finish import finish
from dray.runs.recovery import Failure, recoveries
from dray.runs.result import summary
from dray.runs.store import RunPaths
from dray.runs.write import read_recipe, write

FACTS = Facts(scheduler="local", nodelist="n1", nodes=1, engine="bare", image="python3")


def start(time: float, load: float = 0.5) -> dict[str, object]:
    return {"event": "start", "time": time, "load_s": load}


def step(time: float, number: int) -> dict[str, object]:
    return {"event": "step", "time": time, "step": number, "loss": 1.0}


def log(paths: RunPaths, *events: dict[str, object]) -> None:
    with paths.metrics.open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)


def attempt(root: Path, runs: Path, run: str | None, began: float) -> RunPaths:
    _, paths = write(read_recipe(root / "recipes" / "smoke-cpu.toml", []), FACTS, runs=runs, run=run)
    os.utime(paths.plan, (began, began))
    return paths


def failed(folder: Path, time: float, ended: float, why: str = "killed by SIGKILL") -> None:
    folder.mkdir(exist_ok=True)
    record = {"time": time, "node": "n1", "rank": 0, "code": 137, "why": why, "log": None, "last_lines": []}
    (folder / "rank-0.json").write_text(json.dumps(record))
    os.utime(folder, (ended, ended))


def test_of_a_restart_and_of_the_attempt_before(root: Path, tmp_path: Path) -> None:
    first = attempt(root, tmp_path, None, 100)
    log(first, start(110), step(111, 1), step(120, 10))
    failed(first.folder / run_folder.restart(1), 121, 123)
    log(first, start(130, 2.0), step(131.5, 6))
    failed(first.failures, 140, 141, "node 1 (n2) is gone")
    result = finish(first, code=75)
    (within,) = result.recoveries
    times = within.model_dump(exclude={"why", "step"})
    assert times == {"detect_s": 1, "stop_s": 2, "queue_s": 0, "start_s": 5, "load_s": 2, "step_s": 1.5}
    assert (
        "recovered: step 6 10.5 s after killed by SIGKILL (stop 2.0, start 5.0, load 2.0, step 1.5)"
        in summary(result, first).splitlines()
    )
    os.utime(first.result, (150, 150))
    second = attempt(root, tmp_path, first.run.name, 270)
    log(second, start(280), step(281, 6))
    (between,) = finish(second, code=0).recoveries
    assert between.model_dump(exclude={"why", "step"}) == {
        "detect_s": 8.5, "stop_s": 10, "queue_s": 120, "start_s": 9.5, "load_s": 0.5, "step_s": 1,
    }  # fmt: skip
    assert between.why == "node 1 (n2) is gone"


def test_no_step_no_recovery(root: Path, tmp_path: Path) -> None:
    paths = attempt(root, tmp_path, None, 100)
    log(paths, start(110), step(111, 1))
    failed(paths.failures, 121, 123)
    result = finish(paths, code=137)
    assert result.recoveries == []
    assert "recovered" not in summary(result, paths)


def test_one_that_failed_again_at_once_is_counted_from_its_last_failure() -> None:
    events = [start(10), step(11, 1), start(35), step(36, 1)]
    found = recoveries([Failure("a", 20, 21), Failure("b", 30, 31)], events)
    assert [(one.why, one.detect_s, one.stop_s, one.start_s) for one in found] == [("b", 19, 1, 3.5)]


@pytest.mark.parametrize(
    "event", [{}, {"event": "start"}, {"event": "start", "time": "x"}, {"event": "step", "time": 40.0, "step": "x"}]
)
def test_odd_events(event: dict[str, object]) -> None:
    assert recoveries([Failure("a", 20, 21)], [event, event]) == []


def test_clocks_that_differ_give_no_negative_times() -> None:
    (found,) = recoveries([Failure("a", 20, 19)], [start(25, load=50), step(24, 1)])
    assert min(found.stop_s, found.start_s, found.step_s) == 0
