"""The one door to subprocesses on the host side. Commands are lists of strings; no shell ever sees them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dray.contract.findings import DrayError, UnfitError


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str


def which(name: str) -> str | None:
    """Where PATH has this program."""
    return shutil.which(name)


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    show: bool = False,
    check: bool = True,
) -> Done:
    """Run to the end. `env` is added to this process's own; `show` lets the user see the output as it comes."""
    words = [str(word) for word in argv]
    pipe = None if show else subprocess.PIPE
    try:
        ended = subprocess.run(  # noqa: S603  a list, never a shell
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=None if show else subprocess.DEVNULL,  # who shows may also ask, as for a passphrase
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError as missing:
        raise UnfitError(f"{words[0]} is not on this machine", where=f"PATH={os.environ.get('PATH', '')}") from missing
    done = Done(argv=tuple(words), code=ended.returncode, out=ended.stdout or "", err=ended.stderr or "")
    if check and done.code != 0:
        raise DrayError(
            f"{words[0]} failed with exit code {done.code}",
            where=" ".join(words),
            found="\n".join((done.err or done.out).strip().splitlines()[-15:]) or None,
        )
    return done


def follow(argv: Sequence[str | Path], *, on_line: Callable[[str], None], env: Mapping[str, str] | None = None) -> int:
    """Run to the end, each line of both streams going to `on_line` as it comes; the exit code."""
    with subprocess.Popen(  # noqa: S603  a list, never a shell
        [str(word) for word in argv],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as running:
        try:
            for line in running.stdout or ():
                on_line(line.rstrip("\n"))
        except BaseException:
            os.killpg(running.pid, signal.SIGTERM)  # with all that it has started
            raise
    return running.returncode


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and a closed terminal (but for nohup) end what is done here as Ctrl-C does: with nothing left behind."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    heard = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Running:
    """A command that goes on meanwhile. It leads a process group, so that all it starts can be stopped."""

    def __init__(self, started: subprocess.Popen[bytes]) -> None:
        self._started = started

    def code(self) -> int | None:
        """Its exit code as a shell gives it (128 + signal), or None while it runs."""
        code = self._started.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, seconds: float | None = None) -> None:
        """Until it ends or the time is over."""
        with suppress(subprocess.TimeoutExpired):
            self._started.wait(timeout=seconds)

    def stop(self) -> None:
        """End the whole group, in peace if it can be. Ranks, in sessions of their own, end with their launcher."""
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
            try:
                os.killpg(self._started.pid, number)
            except ProcessLookupError:
                return
            self.wait(patience)


def start(argv: Sequence[str | Path], *, env: Mapping[str, str], output: IO[bytes]) -> Running:
    """Start and come back at once. `env` is everything it gets; both its streams go to `output`."""
    return Running(
        subprocess.Popen(  # noqa: S603  a list, never a shell
            [str(word) for word in argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    )
