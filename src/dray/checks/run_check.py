"""Runs one check: its result, or why it failed, as a finding."""

from __future__ import annotations

import time
from collections.abc import Callable

from dray.contract import exit_codes
from dray.contract.findings import DrayError, Finding


class Skip(DrayError):  # noqa: N818  nothing is in error
    """This cannot be checked on this machine, and nothing is wrong."""

    exit_code = exit_codes.DONE


def check(name: str, work: Callable[[], str], *, fix: str = "") -> Finding:
    """The finding of what the work returns, or of how it failed."""
    began = time.monotonic()
    try:
        found = work()
    except Exception as error:
        return failed(name, error, fix=fix)
    seconds = time.monotonic() - began
    return passed(name, f"{found} ({seconds:.1f} s)" if seconds >= 0.1 else found)


def passed(name: str, found: str) -> Finding:
    """The finding of a check that passed."""
    return Finding(name, found=found, kind="ok")


def skipped(name: str, found: str, *, fix: str = "") -> Finding:
    """The finding of a check that was not made."""
    return Finding(name, found=found, fix=fix, kind="skip")


def failed(name: str, error: Exception, *, fix: str = "") -> Finding:
    """The finding of an error; for a library's error, its last line, where libraries put the cause."""
    if isinstance(error, DrayError):
        return error.finding._replace(problem=name, found=error.problem, kind="skip")
    last = str(error).strip().rpartition("\n")[2].strip()
    found = f"{type(error).__name__}: {last}".removesuffix(": ")
    return Finding(name, found=found, fix=fix, code=exit_codes.UNFIT)
