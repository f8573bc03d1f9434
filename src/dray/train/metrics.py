"""metrics.jsonl: one JSON object a line, written by rank 0 as it happens. docs/metrics.md is its schema."""

from __future__ import annotations

import json
import math
import time
from typing import Any


class Metrics:
    """The file, and a plain line for who watches rank 0's log."""

    def __init__(self, path: str, *, writes: bool) -> None:
        self._file = open(path, "a", encoding="utf-8") if writes else None  # noqa: SIM115, PTH123  open for the whole run

    def write(self, event: str, shown: str, **fields: Any) -> None:  # noqa: ANN401  any JSON value
        """One line, flushed: a reader follows it live. Every rank shows it in its own log."""
        print(shown, flush=True)
        if self._file is not None:
            self._file.write(
                json.dumps({"event": event, "time": round(time.time(), 3), **fields}, allow_nan=False) + "\n"
            )
            self._file.flush()


def perplexity(loss: float) -> float:
    """exp of the mean loss a token; past 700 a float has no room, and nobody cares."""
    return math.exp(min(loss, 700.0))
