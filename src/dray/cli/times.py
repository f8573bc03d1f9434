"""Times as users type and read them, in this machine's time zone, as squeue shows them."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta
from datetime import time as clock
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
    if found := re.fullmatch(r"([0-9]{1,6}) ?([smhdw])", text):
        return time.time() - int(found[1]) * _SECONDS[found[2]]
    try:
        if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?", text):
            now = datetime.fromtimestamp(time.time()).astimezone()
            at = datetime.combine(now, clock.fromisoformat(text if text[2] == ":" else f"0{text}"))
            return (at if at <= now.replace(tzinfo=None) else at - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            "--since has a wrong value",
            wanted="an age such as 90m, 12h, 3d or 2w, a time such as 18:00, or a date: 2026-11-24 or 2026-11-24T18:00",
            found=ascii(text),
        ) from None


def seconds(utc: str | None) -> float | None:
    """A time of result.json in seconds since 1970; None if there is none."""
    try:
        return datetime.fromisoformat(utc).timestamp() if utc else None
    except (ValueError, OverflowError):
        return None


def local(utc: str | None) -> str:
    """A time of result.json in this machine's zone, to the minute; empty if there is none."""
    at = seconds(utc)
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
