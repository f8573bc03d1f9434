"""Standard streams that are connections, as under slurm/login.sh and sshd."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys

import pytest

from dray.cli import streams
from helpers import PYTHON, ROOT


def reset() -> socket.socket:
    """A connection that its other end has reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    return ours


def test_output_into_a_connection_that_was_reset() -> None:
    """As into a closed pipe."""
    argv = [sys.executable, "-m", "dray", "--help"]
    with reset() as ours:
        done = subprocess.run(
            argv, env=PYTHON, cwd=ROOT, stdout=ours, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_verb_ends_with_its_input_also_when_that_was_reset() -> None:
    """Not in a traceback of the thread that reads it, while the verb goes on."""
    with reset() as ours, pytest.raises(KeyboardInterrupt):
        streams._end_with(ours.fileno())
