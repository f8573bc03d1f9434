"""What a user reads while something is fetched or built, by a clock of the test's own."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dray.clients import progress
from dray.clients.progress import Progress, Silence
from dray.images import build_output
from dray.images.build_output import build_log
from helpers import until

MB = 1_000_000


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("total", "seen", "lines"),
    [
        (0, [(1, 5), (4, 30)], []),  # over before a line is due
        (0, [(6, 30), (8, 40), (11, 55)], ["6 30 MB", "11 55 MB"]),
        (600, [(6, 30)], ["6 30 of 600 MB"]),  # too early to tell the time
        (600, [(6, 60), (20, 300), (36, 560)],
         [f"{done} of 600 MB, about 1 min left" for done in ("6 60", "20 300", "36 560")]),
        (6000, [(60, 500)], ["60 500 of 6000 MB, about 11 min left"]),
        (100, [(10, 101)], ["10 101 MB"]),  # the sum was no more than an estimate
        (600, [(6, 60), (12, 60), (90, 60), (93, 70)],  # after a silence, which has lines of its own
         ["6 60 of 600 MB, about 1 min left", "93 70 of 600 MB, about 12 min left"]),
        (600, [(31, 0), (90, 0)], []),  # nothing has come: the step's own line says what is waited for
    ],
)  # fmt: skip
def test_lines_on_bytes(total: int, seen: Sequence[tuple[float, int]], lines: list[str]) -> None:
    clock, told = Clock(), []
    fetch = Progress("wheels", total=total * MB, clock=clock, say=lambda line: told.append((clock.now - 100, line)))
    for second, done in seen:
        clock.now = 100 + second
        fetch.at(done * MB)
    assert [f"{second:.0f} {line.removeprefix('dray: wheels: ')}" for second, line in told] == lines


def test_a_folder_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what it gains; pip makes and removes folders in it."""
    monkeypatch.setattr(progress, "_LOOK_S", 0.01)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    (tmp_path / "before").write_bytes(bytes(3 * MB))
    said: list[str] = []
    with progress.watch(tmp_path, "wheels", total=8 * MB, say=said.append):
        (tmp_path / "pip unpack").mkdir()
        (tmp_path / "pip unpack/x.whl").write_bytes(bytes(5 * MB))
        until(lambda: said[-1:] == ["dray: wheels: 5 of 8 MB"], lambda: said)
    assert progress.size(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        ([(0, "dray: step 55-deepspeed")], {30: "step 55-deepspeed: 30 s", 60: "step 55-deepspeed: 60 s",
                                            90: "step 55-deepspeed: 90 s", 120: "step 55-deepspeed: 120 s",
                                            150: "step 55-deepspeed: 150 s"}),
        ([(0, "dray: wheels"), (10, "dray: wheels: 20 of 600 MB"), (80, "dray: wheels: 40 of 600 MB")],
         {40: "wheels: 40 s", 70: "wheels: 70 s", 110: "wheels: 110 s", 140: "wheels: 140 s"}),
        ([(0, "dray: builder"), (103, "Step 3/9 : RUN apt-get update")],
         {30: "builder: 30 s", 60: "builder: 60 s", 90: "builder: 90 s", 133: "Step 3/9 : RUN apt-get update: 30 s",
          163: "Step 3/9 : RUN apt-get update: 60 s"}),
        ([(0, "dray: step 10-system"), (120, "dray: step 10-system done in 120 s")],
         {30: "step 10-system: 30 s", 60: "step 10-system: 60 s", 90: "step 10-system: 90 s", 150: "the build: 30 s"}),
    ],
)  # fmt: skip
def test_silence_is_broken(shown: Sequence[tuple[int, str]], wanted: dict[int, str]) -> None:
    clock, found, lines = Clock(), {}, dict(shown)
    clock.now = 0.0
    silence = Silence(clock)
    for second in range(166):
        clock.now = float(second)
        if second in lines:
            silence.shown(lines[second])
        if line := silence.line():
            found[second] = line
    assert {second: line.removeprefix("dray: ") for second, line in found.items()} == {
        second: f"{line} so far" for second, line in wanted.items()
    }


def test_what_a_user_sees_of_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of it is in the file; on the screen are the steps, those of the builder's own build too."""
    lines = [
        "dray: builder",
        "Step 1/2 : FROM debian AS builder",
        " ---> 123456",
        "Step 2/2 : RUN " + "x" * 200,
        "Get:1 bookworm InRelease",
        "dray: " + "y" * 200,
    ]
    with build_log(tmp_path / "logs/cpu.log") as say:
        for line in lines:
            say(line)
    assert (tmp_path / "logs/cpu.log").read_text().splitlines() == lines
    seen = capfd.readouterr().err.splitlines()
    assert seen == [lines[0], lines[1], lines[3][:120], lines[5]]


def test_a_long_step_is_told_and_the_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Silence, "_WAIT_S", 0.0)
    monkeypatch.setattr(build_output, "_LOOK_S", 0.01)
    seen = ""
    with build_log(tmp_path / "logs/cpu.log") as say:
        say("dray: step 55-deepspeed")
        limit = time.monotonic() + 20
        while "so far" not in seen and time.monotonic() < limit:
            seen += capfd.readouterr().err
    assert re.search(r"^dray: step 55-deepspeed: \d+ s so far$", seen, re.MULTILINE)
    assert "so far" not in (tmp_path / "logs/cpu.log").read_text()
