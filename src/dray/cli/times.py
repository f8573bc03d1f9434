"""Times as users type and read them, in this machine's time zone, as squeue shows them."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Annotated

import typer

from dray.contract.findings import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
Since = Annotated[
    str, typer.Option(metavar="WHEN", help="Only runs that began since then: 90m, 12h, 3d, 18:00, or 2026-11-24T18:00.")
]


def since(text: str) -> float:
    """The typed time in seconds since 1970; 0 if it is empty."""
    if not text:
        return 0.0
    now = datetime.fromtimestamp(time.time())
    if age := re.fullmatch(r"([0-9]{1,6}) ?([smhdw])", text):
        return now.timestamp() - int(age[1]) * _SECONDS[age[2]]
    with suppress(ValueError, OverflowError):
        if re.fullmatch(r"[0-9]{1,2}:[0-9:]+", text):
            at = datetime.fromisoformat(f"{now:%Y-%m-%d}T{text:0>5}")
            return (at if at <= now else at - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    raise ConfigError(
        "--since has a wrong value",
        wanted="an age such as 90m, 12h, 3d or 2w, a time such as 18:00, or a date: 2026-11-24 or 2026-11-24T18:00",
        found=ascii(text),
    )


def seconds(utc: str | None) -> float | None:
    """A time of result.json in seconds since 1970; None if there is none."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(utc).timestamp() if utc else None
    return None


def local(utc: str | None) -> str:
    """A time of result.json in this machine's zone, to the minute; empty if there is none."""
    at = seconds(utc)
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
