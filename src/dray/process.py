"""All subprocesses on the host start in this module. Commands are lists of strings; no shell parses them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, NoReturn

from dray.contract.findings import DrayError, UnfitError
from dray.interrupts import Interrupts, held_back

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_REST = 2.0  # seconds for the last lines of a command that has ended


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str


def which(name: str) -> str | None:
    """The path of this program, from PATH."""
    return shutil.which(name)


def apptainer() -> str | None:
    """Apptainer's name on this machine; sites keep the old one for a long time."""
    return next((name for name in ("apptainer", "singularity") if which(name)), None)


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    show: bool = False,
    check: bool = True,
    seconds: float | None = None,
) -> Done:
    """Run to the end. `env` is added to this process's; `show` passes the output on to the user as it comes.

    What has not ended after so many `seconds` is killed with all that it has started, and refused.
    """
    command = [str(argument) for argument in argv]
    pipe = None if show else subprocess.PIPE
    try:
        with (
            held_back() as begun,
            subprocess.Popen(  # noqa: S603  a list, never a shell
                command,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                stdin=None if show else subprocess.DEVNULL,  # a shown program may ask for a passphrase
                stdout=pipe,
                stderr=pipe,
                text=True,
                errors="replace",
                start_new_session=seconds is not None,
            ) as running,
        ):
            try:
                begun()
                out, err = running.communicate(timeout=seconds)
            except BaseException:
                if seconds is None:
                    running.kill()
                else:  # it leads a group
                    with suppress(ProcessLookupError):
                        os.killpg(running.pid, signal.SIGKILL)
                raise
    except FileNotFoundError as missing:
        raise UnfitError(f"{command[0]} is not installed", where=f"PATH={os.environ.get('PATH', '')}") from missing
    except subprocess.TimeoutExpired as late:
        raise no_answer(command, late.timeout) from late
    done = Done(argv=tuple(command), code=running.returncode, out=out or "", err=err or "")
    if check and done.code != 0:
        raise DrayError(
            f"{command[0]} failed with exit code {done.code}",
            where=" ".join(command),
            found="\n".join((done.err or done.out).strip().splitlines()[-15:]) or None,
        )
    return done


def no_answer(argv: Sequence[str], seconds: float) -> UnfitError:
    """The error for a command that did not end in time."""
    return UnfitError(
        f"{Path(argv[0]).name} gave no answer in {seconds:g} s",
        where=shlex.join(argv),
        fix="run it by hand; the cause is often a network disk, a registry or a FUSE mount that does not answer",
    )


def follow(argv: Sequence[str | Path], *, on_line: Callable[[str], None], env: Mapping[str, str] | None = None) -> int:
    """Run to the end, with each line of both streams passed to `on_line`; return the exit code."""
    with (
        held_back() as begun,
        subprocess.Popen(  # noqa: S603  a list, never a shell
            [str(argument) for argument in argv],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as running,
    ):
        try:
            begun()
            for line in running.stdout or ():
                on_line(line.rstrip("\n"))
        except BaseException:
            os.killpg(running.pid, signal.SIGTERM)  # with all that it has started
            raise
    return running.returncode


def converse(
    argv: Sequence[str | Path],
    *,
    feed: Iterable[bytes],
    on_out: Callable[[bytes], object],
    on_err: Callable[[bytes], object],
) -> int:
    """Run to the end, and return the exit code. Its input is what `feed` yields, and stays open as long as it runs;
    what `feed` raises ends it."""
    failed: list[Exception] = []

    def write(stream: IO[bytes]) -> None:
        try:
            _write_all(stream, feed)
        except Exception as error:  # the other thread raises it
            failed.append(error)
            running.terminate()

    with (
        held_back() as begun,
        subprocess.Popen(  # noqa: S603  a list, never a shell
            [str(argument) for argument in argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        ) as running,
    ):
        begun()
        assert running.stdin
        assert running.stdout
        assert running.stderr
        threads = [
            Thread(target=write, args=(running.stdin,), daemon=True),
            Thread(target=_read_all, args=(running.stderr, on_err), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            _read_all(running.stdout, on_out)
            code = running.wait()
            # All that it wrote is read in a moment; what it left in the background may keep the stream open for hours.
            threads[1].join(_REST)
            if failed:
                raise failed[0]
        except BaseException:
            running.terminate()
            raise
    return code


def in_terminal(argv: Sequence[str], *, errors: IO[bytes]) -> int:
    """Run to the end, or until it goes into the background; it may ask at the terminal. Return the exit code."""
    with (
        held_back() as begun,
        subprocess.Popen(  # noqa: S603  a list, never a shell
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        ) as running,
    ):
        begun()
        return running.wait()


def _write_all(stream: IO[bytes], feed: Iterable[bytes]) -> None:
    for block in feed:
        rest = memoryview(block)
        while rest:
            try:
                rest = rest[stream.write(rest) :]
            except (BrokenPipeError, ValueError):  # it has ended before it read all
                return


def _read_all(stream: IO[bytes], on_block: Callable[[bytes], object]) -> None:
    while not stream.closed and (block := stream.read(1 << 16)):
        on_block(block)


def in_front(argv: Sequence[str]) -> int:
    """Run to the end with this program's terminal; return the exit code, 128 + number after a signal.

    A terminal's Ctrl-C reaches both, and the command answers it. SIGTERM reaches this process alone,
    which passes it on.
    """
    heard: list[int] = []
    begun: list[subprocess.Popen[bytes]] = []

    def hear(number: int, _frame: object) -> None:
        heard.append(number)
        if number == signal.SIGTERM:
            for command in begun:
                command.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [one for one in numbers if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in caught}
    sys.stdout.flush()
    try:
        begun.append(subprocess.Popen(list(argv)))  # noqa: S603  a list, never a shell
        if signal.SIGTERM in heard:  # before there was a command
            begun[0].send_signal(signal.SIGTERM)
        code = begun[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + heard[0] if heard else code if code >= 0 else 128 - code


def replace(argv: Sequence[str], env: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this program by another one."""
    program = which(argv[0])
    if not program:
        raise UnfitError(f"{argv[0]} is not installed", where=f"PATH={os.environ.get('PATH', '')}")
    sys.stdout.flush()
    os.execve(program, list(argv), dict(os.environ if env is None else env))  # noqa: S606  a list, never a shell


class Running:
    """A command in the background. It leads a process group, so that all it starts can be stopped."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def code(self) -> int | None:
        """Its exit code as a shell gives it (128 + signal), or None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it ends, or for this many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)

    def ask(self, number: int, seconds: float) -> bool:
        """Send the whole group a signal; return whether it ended within this many seconds."""
        began = time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        while self.code() is None and time.monotonic() - began < (
            min(seconds, _GRACE) if Interrupts.hurry else seconds
        ):
            self.wait(0.1)
        return self.code() is not None

    def stop(self) -> None:
        """End the whole group, with SIGTERM first. Ranks have sessions of their own and end with their launcher.

        After `hurry_on_signals` a second Ctrl-C does not wait for what they do on SIGTERM.
        """
        deadline = time.monotonic() + _GRACE
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while self.code() is None and not Interrupts.hurry and time.monotonic() < deadline:
                self.wait(0.1)
            os.killpg(self._process.pid, signal.SIGKILL)
            self.wait()


def start(argv: Sequence[str | Path], *, env: Mapping[str, str], output: IO[bytes]) -> Running:
    """Start in the background. `env` is its whole environment; both its streams go to `output`."""
    return Running(
        subprocess.Popen(  # noqa: S603  a list, never a shell
            [str(argument) for argument in argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    )
