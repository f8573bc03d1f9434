"""The name of a failure's cause and its fix, by the signs in causes.toml; unknown if no sign fits."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from itertools import dropwhile, pairwise
from pathlib import Path
from re import Pattern

from pydantic import BaseModel, ConfigDict

from dray.contract import exit_codes
from dray.runs.result import Cause

FOLLOWS = "another rank ended first"
_FILE = Path(__file__).with_name("causes.toml")
_LONGEST = 4000  # characters of a line that are searched
_BY_RANK = r"(?:\[rank\d{1,9}\]: ?)?"  # torch's prefix for each line of an exception and of its log
_TRACEBACK = re.compile(_BY_RANK + r'(?:Traceback \(most recent call last\):|  File ".{1,300}", line \d{1,9}, in )')
_DETAIL = re.compile(r"  (?:where|wanted|found|fix): ")
_LOGGED = re.compile(
    _BY_RANK + r"\[?[IW]\d{4} \d\d:\d\d:\d\d|.{1,300}\.py:\d{1,9}: \w{1,60}Warning: |  warnings\.warn\("
)
"""Lines that torch and Python only log or warn with."""


class _Known(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sign(_Known):
    """A sign of a cause: every given field must match."""

    why: Pattern[str] | None = None
    """Matches the reason in the failure's record, which is dray's own text."""
    lines: Pattern[str] | None = None
    """Matches one of the last lines, or the reason."""
    evidence: Pattern[str] | None = None
    codes: tuple[int, ...] = ()
    reason: tuple[str, ...] = ()
    """What stopped the run."""
    source: str
    """The program or document that the text comes from."""


class Known(_Known):
    """A cause that causes.toml names."""

    name: str
    fix: str
    again: bool = False
    """Whether another attempt may succeed (exit code 75), whatever code the rank ended with."""
    sign: tuple[Sign, ...]


@cache
def known() -> tuple[Known, ...]:
    """All causes, in the order in which they are tried."""
    return tuple(map(Known.model_validate, tomllib.loads(_FILE.read_text(encoding="utf-8"))["cause"]))


def explained(cause: Cause) -> Cause:
    """The cause with its name and fix; its last lines begin where the failure shows."""
    lines = [line for text in (cause.why, *cause.last_lines) for line in text.splitlines()]
    for one in known():
        for sign in one.sign:
            if not sign.reason and _fits(sign, cause, lines):
                code = exit_codes.RETRY if one.again else cause.code
                last_lines = _from_failure(cause.last_lines, sign)
                return cause.model_copy(
                    update={"name": one.name, "fix": one.fix, "code": code, "last_lines": last_lines}
                )
    return cause.model_copy(update={"last_lines": _from_failure(cause.last_lines)})


def of_reason(reason: str | None) -> dict[str, str]:
    """The name and fix for this reason of a stopped run; empty if it has none."""
    for one in known():
        if any(reason in sign.reason for sign in one.sign):
            return {"name": one.name, "fix": one.fix}
    return {}


def _fits(sign: Sign, cause: Cause, lines: list[str]) -> bool:
    texts = ((sign.why, cause.why.splitlines()), (sign.lines, lines), (sign.evidence, cause.evidence))
    return (not sign.codes or cause.code in sign.codes) and all(
        any(pattern.search(line[:_LONGEST]) for line in where) for pattern, where in texts if pattern
    )


def _from_failure(lines: list[str], sign: Sign | None = None) -> list[str]:
    """The lines from the first traceback, finding or sign; else without torch's log lines."""
    for number, (line, below) in enumerate(pairwise([*lines, ""])):
        is_finding = line[:1].strip() and _DETAIL.match(below)
        if is_finding or _TRACEBACK.match(line) or (sign and sign.lines and sign.lines.search(line[:_LONGEST])):
            return lines[number:]
    return list(dropwhile(_LOGGED.match, lines)) or lines
