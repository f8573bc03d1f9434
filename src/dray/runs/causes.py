"""The name of a failure and its fix, by the signs in causes.toml. What no sign tells stays unknown."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from re import Pattern
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dray.contract import exit_codes
from dray.runs.result import UNKNOWN, Cause

FOLLOWS = "another rank ended first"
_FILE = Path(__file__).with_name("causes.toml")
_LONGEST = 4000  # of a line that is looked at, at its beginning
_MOST = 200  # lines


class Sign(BaseModel):
    """What tells of a cause: all that is given must be so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    why: Pattern[str] | None = None
    """Of what the record gives as the reason, which is dray's own text."""
    lines: Pattern[str] | None = None
    """In one of the last lines, or in that reason."""
    evidence: Pattern[str] | None = None
    codes: tuple[int, ...] = ()
    reason: tuple[str, ...] = ()
    """What stopped the run."""
    source: str
    """Where this text comes from."""


class Known(BaseModel):
    """One cause."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    fix: str
    again: bool = False
    """Whether the same again may succeed (75), whatever the rank ended with."""
    sign: Annotated[tuple[Sign, ...], Field(min_length=1)]


@cache
def known() -> tuple[Known, ...]:
    """In the order in which they are tried."""
    found = tomllib.loads(_FILE.read_text(encoding="utf-8"))["cause"]
    return tuple(Known.model_validate(one) for one in found)


def explained(cause: Cause) -> Cause:
    """The same with its name, its fix, and where these come from."""
    lines = [line for text in (cause.why, *cause.last_lines) for line in text.splitlines()][-_MOST:]
    for one in known():
        for sign in one.sign:
            if not sign.reason and _fits(sign, cause, lines):
                code = exit_codes.RETRY if one.again else cause.code
                return cause.model_copy(update={"name": one.name, "fix": one.fix, "source": sign.source, "code": code})
    return cause.model_copy(update={"name": UNKNOWN, "fix": "", "source": ""})


def of_reason(reason: str) -> tuple[Known, Sign] | None:
    """What stopped a run, and what follows from it."""
    return next(((one, sign) for one in known() for sign in one.sign if reason in sign.reason), None)


def _fits(sign: Sign, cause: Cause, lines: list[str]) -> bool:
    texts = ((sign.why, cause.why.splitlines()), (sign.lines, lines), (sign.evidence, cause.evidence))
    return (not sign.codes or cause.code in sign.codes) and all(_any(pattern, where) for pattern, where in texts)


def _any(pattern: Pattern[str] | None, lines: list[str]) -> bool:
    return pattern is None or any(pattern.search(line[:_LONGEST]) for line in lines)
