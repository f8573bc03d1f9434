"""The slow tests that .ci/run takes: other ones each day, and all in twenty days."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest

MARKED = """
import pytest


@pytest.mark.slow
def test_a_function() -> None: ...


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_parameter(number: int) -> None: ...


@pytest.mark.slow
class TestAClass:
    def test_first(self) -> None: ...

    def test_second(self) -> None: ...
"""
FAST = "test_marked.py::test_a_parameter[1]"
SLOW = [
    f"test_marked.py::{test}"
    for test in ("test_a_function", "test_a_parameter[2]", "TestAClass::test_first", "TestAClass::test_second")
]
DAYS = {test: str(crc32(test.encode()) % 20) for test in SLOW}


@pytest.mark.seconds
@pytest.mark.parametrize("day", [None, *sorted(set(DAYS.values()))[:2]])
def test_a_test_runs_with_the_fast_ones_on_its_day_alone(root: Path, tmp_path: Path, day: str | None) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    env = {name: value for name, value in os.environ.items() if name != "DRAY_TEST_DAY"}
    env |= {"PYTHONPATH": f"{root / 'tests'}:{root / 'tests' / 'support'}"}
    env |= {} if day is None else {"DRAY_TEST_DAY": day}
    argv = [sys.executable, "-m", "pytest", "-p", "conftest", "--collect-only", "-q", "-m", "not slow"]
    ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    collected = {line for line in ended.stdout.splitlines() if "::" in line}
    assert collected == {FAST, *(test for test in SLOW if DAYS[test] == day)}


def test_twenty_days_take_each_once(root: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"^DRAY_TEST_DAY=.*$", (root / ".ci" / "run").read_text(), re.MULTILINE)
    date = tmp_path / "date"
    date.write_text('#!/bin/sh\n[ "$*" = +%s ] && echo $NOW\n')
    date.chmod(0o755)
    days = []
    for day in range(20780, 20800):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOW": str(day * 86400 + 7)}
        argv = ["bash", "-euc", f"{line}\necho $DRAY_TEST_DAY"]
        days.append(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip())
    assert days == [str(day) for day in range(20)]
