"""All subprocesses on the host start in this module. Commands are lists of strings; no shell parses them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from dray.contract.findings import DrayError, UnfitError

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL


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
            _interrupts_wait() as begun,
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
    """The refusal of a command that has not ended in time."""
    return UnfitError(
        f"{Path(argv[0]).name} gave no answer in {seconds:g} s",
        where=shlex.join(argv),
        fix="run it by hand; what hangs is often a network disk, a registry or a FUSE mount that does not answer",
    )


def follow(argv: Sequence[str | Path], *, on_line: Callable[[str], None], env: Mapping[str, str] | None = None) -> int:
    """Run to the end, with each line of both streams passed to `on_line`; return the exit code."""
    with (
        _interrupts_wait() as begun,
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


class _Interrupts:
    """Whether a signal must wait, and which one does; whether one came while all is being stopped."""

    wait = False
    pending = 0
    hurry = False


@contextmanager
def _interrupts_wait() -> Iterator[Callable[[], None]]:
    """Hold a signal back until the caller says that its command has begun.

    An interrupt in the middle of Popen would leave a child that nobody waits for, and its pipes open.
    """

    def begun() -> None:
        _Interrupts.wait, number = False, _Interrupts.pending
        _Interrupts.pending = 0
        if number:
            raise KeyboardInterrupt(signal.Signals(number).name)

    _Interrupts.wait = True
    try:
        yield begun
    finally:
        begun()


@contextmanager
def stoppable() -> Iterator[None]:
    """Handle SIGTERM and a closed terminal (except under nohup) as Ctrl-C: the `finally` blocks run."""

    def interrupt(number: int, _frame: object) -> None:
        if _Interrupts.wait:
            _Interrupts.pending = number
            return
        raise KeyboardInterrupt(signal.Signals(number).name)

    caught = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in caught}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hurry_on_signals() -> None:
    """Until `stoppable` ends, a signal raises nothing: what is being stopped is killed at once, and none is left."""

    def note(_number: int, _frame: object) -> None:
        _Interrupts.hurry = True

    _Interrupts.hurry = False
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)


def in_front(argv: Sequence[str]) -> int:
    """Run with this program's terminal to the end; return the exit code as a shell gives it, 128 + signal after one.

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
    """Start in this program's place, with its terminal and all."""
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
        """Until it ends, or for so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)

    def stop(self) -> None:
        """End the whole group, with SIGTERM first. Ranks have sessions of their own and end with their launcher.

        After `hurry_on_signals` a second Ctrl-C does not wait for what they do on SIGTERM.
        """
        deadline = time.monotonic() + _GRACE
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while self.code() is None and not _Interrupts.hurry and time.monotonic() < deadline:
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
