"""Ranks of a test that never end are killed, and the next test hears its own ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import trainings
from helpers import runs, until
from trainings import Forks, Run

pytestmark = pytest.mark.torch
# Its ranks end if the environment of the first one has what they wait for.
STAND_IN = """
import json, sys
for line in sys.stdin:
    ranks = json.loads(line)["ranks"]
    print([0 for _ in ranks], flush=True)
    if ranks[0]["env"].get("GO"):
        print(json.dumps({"codes": json.loads(ranks[0]["env"]["GO"])}), flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    forks = Forks([sys.executable, "-c", STAND_IN])
    yield Run(forks, tmp_path / "run", 2)
    forks.close()


def test_ranks_that_never_end_are_not_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(trainings, "PATIENCE_S", 2.0)
        with pytest.raises(TimeoutError, match="the ranks did not end within 2 s"):
            run.end()
    assert run.end(GO="[0, 0]").codes == [0, 0]


def test_ranks_of_a_test_that_fails_are_not_waited_for(run: Run) -> None:
    with pytest.raises(ZeroDivisionError), run.going():
        _ = 1 / 0
    assert run.end(GO="[0, 0]").codes == [0, 0]


@pytest.mark.parametrize(("codes", "code"), [("[0, 0]", 0), ("[-9, 69]", 69), ("[-9, -9]", -9), ("[0, -9]", -9)])
def test_ranks_that_somebody_kills_have_not_ended_well(run: Run, codes: str, code: int) -> None:
    for path in (run.log(0), run.log(1)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    run.end(code, GO=codes)
    with pytest.raises(AssertionError):
        run.end(75, GO=codes)


@pytest.mark.slow
def test_ranks_end_with_the_process_that_became_them(tmp_path: Path) -> None:
    program = "import os, pathlib, signal, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); signal.pause()"
    file, forks = tmp_path / "pid", Forks()
    ranks = [{"env": {}, "streams": [os.devnull, os.devnull, os.devnull]}]
    forks.say({"kind": "python", "words": ["-c", program, str(file)], "ranks": ranks})
    until(lambda: file.exists() and file.read_text())
    forks.restart()
    until(lambda: not runs(file.read_text()))
    forks.close()
