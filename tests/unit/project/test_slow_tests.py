"""The slow tests that .ci/run takes: another tenth each day, and all in ten days."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest

SLOW = "tests/unit/runner/test_stage_tree.py::test_the_first_node_s_chunks_are_flipped"
TENTH = crc32(SLOW.encode()) % 10


@pytest.mark.parametrize(("tenth", "runs"), [(TENTH, True), ((TENTH + 1) % 10, False), (None, False)])
def test_a_test_runs_with_the_fast_ones_in_its_tenth_alone(root: Path, tenth: int | None, runs: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "DRAY_TEST_TENTH"}
    env |= {} if tenth is None else {"DRAY_TEST_TENTH": str(tenth)}
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", SLOW.partition("::")[0]]
    ended = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, check=True)
    assert (SLOW in ended.stdout.splitlines()) is runs


def test_ten_days_take_every_tenth_once(root: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"^DRAY_TEST_TENTH=.*$", (root / ".ci" / "run").read_text(), re.MULTILINE)
    date = tmp_path / "date"
    date.write_text('#!/bin/sh\n[ "$*" = +%s ] && echo $NOW\n')
    date.chmod(0o755)
    tenths = []
    for day in range(20780, 20790):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOW": str(day * 86400 + 7)}
        argv = ["bash", "-euc", f"{line}\necho $DRAY_TEST_TENTH"]
        tenths.append(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip())
    assert tenths == [*"0123456789"]
