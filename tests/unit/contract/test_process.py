"""Commands that are interrupted leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from dray import interrupts, process


@pytest.mark.parametrize(("number", "text"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "")])
@pytest.mark.parametrize("run", [process.run, lambda argv: process.follow(argv, on_line=print)], ids=["run", "follow"])
def test_a_command_whose_start_is_interrupted_is_ended(run, number: int, text: str, monkeypatch) -> None:
    """A quick child may have its parent signalled before Popen is done."""
    started = []

    class Early(subprocess.Popen):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(subprocess, "Popen", Early)
    with interrupts.stoppable(), pytest.raises(KeyboardInterrupt) as stopped:
        run(["sleep", "60"])
    assert str(stopped.value) == text
    assert started[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.seconds
def test_a_stream_that_something_in_the_background_keeps_open_ends_with_the_command() -> None:
    """As a connection of OpenSSH before 8.5 does it, which stays for the next command."""
    out, err, before = bytearray(), bytearray(), {*threading.enumerate()}
    script = "echo told >&2; sleep 1000 >/dev/null </dev/null & echo $!; exit 7"
    try:
        code = process.converse(["sh", "-c", script], feed=[], on_out=out.extend, on_err=err.extend)
        os.kill(int(out), 0)  # it still runs
    finally:
        os.kill(int(out), signal.SIGKILL)
    assert (code, bytes(err)) == (7, b"told\n")
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    assert not {*threading.enumerate()} - before


def test_a_read_error_of_what_is_sent_ends_the_command_and_is_raised() -> None:
    def feed() -> Iterator[bytes]:
        yield b"half"
        raise OSError(5, "Input/output error")

    got = bytearray()
    with pytest.raises(OSError, match="Input/output error"):
        process.converse(["cat"], feed=feed(), on_out=got.extend, on_err=got.extend)


def test_a_command_that_reads_nothing_ends_as_it_ends() -> None:
    code = process.converse(["sh", "-c", "exit 3"], feed=[bytes(1 << 20)] * 4, on_out=print, on_err=print)
    assert code == 3
