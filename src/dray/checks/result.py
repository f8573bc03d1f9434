"""What one check saw, and how it is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "skip", "FAIL"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line, and below it what to do about it."""

    check: str
    state: State
    found: str
    wanted: str | None = None
    fix: str | None = None
    seconds: float | None = None
    said: str | None = None
    """What a compiler or a library wrote meanwhile; kept for a failure only."""

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" ({self.seconds:.1f} s)"
        below = (("wanted", self.wanted), ("fix", self.fix), ("said", self.said))
        lines = [f"{self.state:<5} {self.check}: {self.found}{took}"]
        for name, text in below:
            first, *rest = (text or "").splitlines() or [""]
            lines += [f"      {name + ':':<8}{first}", *(f"{'':<14}{line}" for line in rest)] if first else []
        return "\n".join(lines)


class Skip(Exception):  # noqa: N818  nothing is in error
    """This cannot be seen here, and nothing is wrong."""

    def __init__(self, found: str, *, fix: str | None = None) -> None:
        self.fix = fix
        super().__init__(found)


class Unfit(Exception):  # noqa: N818  named after the exit code's meaning
    """The image cannot do here what it is for."""

    def __init__(self, found: str, *, wanted: str | None = None, fix: str | None = None) -> None:
        self.wanted = wanted
        self.fix = fix
        super().__init__(found)


def attempt(check: str, work: Callable[[], str], *, fix: str | None = None) -> Result:
    """What the work says that it found, or what came in its way."""
    began = time.monotonic()
    try:
        found = work()
    except Skip as skipped:
        return Result(check=check, state="skip", found=str(skipped), fix=skipped.fix)
    except Exception as error:
        return failed(check, error, fix=fix)
    return Result(check=check, state="ok", found=found, seconds=round(time.monotonic() - began, 2))


def failed(check: str, error: Exception, *, fix: str | None = None) -> Result:
    """An error as its last line, where libraries put the cause."""
    if isinstance(error, Unfit):
        return Result(check=check, state="FAIL", found=str(error), wanted=error.wanted, fix=error.fix)
    last = [line.strip() for line in str(error).splitlines() if line.strip()][-1:]
    return Result(check=check, state="FAIL", found=": ".join([type(error).__name__, *last]), fix=fix)


def tail(written: bytes) -> str | None:
    """The last lines, if there are any."""
    return "\n".join(written.decode("utf-8", "replace").rstrip().splitlines()[-5:]) or None
