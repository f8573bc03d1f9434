"""Warnings for the result, from the metrics: failed saves and loss jumps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dray.contract.findings import counted

_WHAT = {"checkpoint": "not saved", "mirror": "not copied"}
_SHOWN = 5
_DIVERGENCE = "divergence"
KINDS = (*_WHAT, _DIVERGENCE)
"""The kinds of events that `warnings` reads."""


def warnings(events: Sequence[dict[str, Any]]) -> list[str]:
    """One warning for each kind of failed save, and the first loss jumps."""
    found = []
    told = [event for event in events if isinstance(event.get("checkpoint"), int)]
    for kind, what in _WHAT.items():
        own = [event for event in told if event["event"] == kind]
        if failed := [event for event in own if event.get("saved") is False]:
            first, last = failed[0], own[-1]
            count, step = counted(len(failed), "checkpoint"), first["checkpoint"]
            text = f"{count} {what}, the first of step {step}: {first.get('why')}"
            mended = f"; step {last['checkpoint']} was saved again" if last.get("saved") is True else ""
            found.append(text[:600] + mended)
    jumps = [str(event.get("why"))[:600] for event in events if event["event"] == _DIVERGENCE]
    more = [f"and {counted(len(jumps) - _SHOWN, 'time')} more"] if len(jumps) > _SHOWN else []
    return found + jumps[:_SHOWN] + more
