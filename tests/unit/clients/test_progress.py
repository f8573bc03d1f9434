"""What a user reads while something is fetched or built."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray.clients import progress
from dray.images import build_output
from dray.images.build_output import build_log
from helpers import until

MB = 1_000_000


@pytest.mark.parametrize(
    ("total", "seconds", "done", "text"),
    [
        (0, 30, 8, "8 MB"),
        (600, 6, 30, "30 of 600 MB"),  # too early to tell the time
        (600, 6, 60, "60 of 600 MB, about 1 min left"),
        (600, 93, 70, "70 of 600 MB, about 12 min left"),
        (6000, 60, 500, "500 of 6000 MB, about 11 min left"),
        (100, 10, 101, "101 MB"),  # the sum was no more than an estimate
    ],
)
def test_what_has_arrived(total: int, seconds: float, done: int, text: str) -> None:
    assert progress.amount(done * MB, total * MB, seconds) == text


def test_a_folder_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what it gains; pip makes and removes folders in it."""
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    (tmp_path / "before").write_bytes(bytes(3 * MB))
    said: list[str] = []
    with progress.watch(tmp_path, "wheels", total=8 * MB, say=said.append):
        (tmp_path / "pip unpack").mkdir()
        (tmp_path / "pip unpack/x.whl").write_bytes(bytes(5 * MB))
        until(lambda: said[-1:] == ["dray: wheels: 5 of 8 MB"], lambda: said)
        (tmp_path / "pip unpack/little").write_bytes(bytes(MB // 10))
        time.sleep(0.1)
    assert said[-1] == "dray: wheels: 5 of 8 MB"
    assert progress.size(tmp_path / "none") == 0


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
    monkeypatch.setattr(build_output, "_SILENCE_S", 0.01)
    seen = ""
    with build_log(tmp_path / "logs/cpu.log") as say:
        say("dray: step 55-deepspeed")
        limit = time.monotonic() + 20
        while " since: " not in seen and time.monotonic() < limit:
            seen += capfd.readouterr().err
    assert re.search(r"^dray: 0 s since: step 55-deepspeed$", seen, re.MULTILINE)
    assert " since: " not in (tmp_path / "logs/cpu.log").read_text()
    capfd.readouterr()
    time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_silence_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Only silence: a line on the screen begins it again, one for the log alone does not."""
    clock = [100.0]
    told = []
    monkeypatch.setattr(build_output, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(progress, "every", lambda _, tell: nullcontext(told.append(tell)))
    seen: dict[float, str] = {}
    with build_log(tmp_path / "logs/cpu.log") as say:
        for second, line in (
            (20, "Step 3/9 : RUN apt"),
            (40, ""),
            (55, "Get:1 bookworm"),
            (75, ""),
            (80, "dray: wheels"),
            (105, ""),
        ):
            clock[0] = 100.0 + second
            if line:
                say(line)
            capfd.readouterr()
            told[0]()
            if text := capfd.readouterr().err:
                seen[second] = text
    assert seen == {55: "dray: 35 s since: Step 3/9 : RUN apt\n", 75: "dray: 55 s since: Step 3/9 : RUN apt\n"}
