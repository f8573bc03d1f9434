"""Ages as users type them, and times as they read them: in this machine's time zone, as squeue shows them."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import datetime

from dray.contract.findings import ConfigError

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def age(option: str, text: str) -> float:
    """The typed age in seconds."""
    found = re.fullmatch(r"([0-9]{1,5})([mhdw])", text)
    if not found:
        raise ConfigError(f"{option} has a wrong value", wanted="an age: 90m, 12h, 3d or 2w", found=ascii(text))
    return int(found[1]) * _SECONDS[found[2]]


def seconds(utc: str | None) -> float | None:
    """A time of result.json in seconds since 1970; None if there is none."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(utc).timestamp() if utc else None
    return None


def local(utc: str | None) -> str:
    """A time of result.json in this machine's zone, to the minute; empty if there is none."""
    at = seconds(utc)
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
