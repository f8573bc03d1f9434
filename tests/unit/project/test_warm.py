"""Programs that tests start by a fork of a warm process end as those that they stand in for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from helpers import runs, until

PROGRAM = """
import os, signal, sys
print(os.getpid(), flush=True)
if sys.argv[1:]:
    sys.exit(int(sys.argv[1]))
signal.pause()
"""


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    argv = [sys.executable, "-SE", str(warm.client()), sys.prefix, "program", *words]
    return subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True)


@pytest.mark.seconds
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_is_killed_with_its_client(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path) as client:
        program = int(client.stdout.readline())
        assert runs(program)
        client.send_signal(number)
    until(lambda: not runs(program))
    assert client.returncode == -number


@pytest.mark.seconds
def test_a_client_has_the_exit_code_of_its_program(tmp_path: Path) -> None:
    with started(tmp_path, "7") as client:
        client.stdout.read()
    assert client.returncode == 7
