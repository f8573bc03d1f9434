"""How long it takes to read a metrics.jsonl of a million steps whole, by `json` and as dray reads it, in turn.

.venv/bin/python benchmarks/metrics.py [LINES [ROUNDS]]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dray.runs.metrics import Metrics


def write(path: Path, lines: int) -> None:
    """A step a line."""
    with path.open("w") as file:
        for step in range(lines):
            event = {"event": "step", "time": 1795570000.123 + step, "step": step, "loss": 6 - step / lines}
            event |= {"tokens_per_s": 12345.6, "seconds_left": 90.5, "step_s": 0.123, "lr": 1e-4, "grad_norm": 1.23}
            file.write(json.dumps(event) + "\n")


def by_json(path: Path) -> float:
    """The sum of the losses."""
    with path.open("rb") as file:
        return sum(json.loads(line)["loss"] for line in file)


def by_dray(path: Path) -> float:
    """The same."""
    return sum(event["loss"] for event in Metrics(path))


def main(lines: str = "1000000", rounds: str = "3") -> None:
    """A line a round."""
    ways: tuple[Callable[[Path], float], ...] = (by_json, by_dray)
    with tempfile.TemporaryDirectory(prefix="dray-metrics-") as folder:
        path = Path(folder, "metrics.jsonl")
        write(path, int(lines))
        for _ in range(int(rounds)):
            found, seconds = [], []
            for way in ways:
                begun = time.perf_counter()
                found.append(way(path))
                seconds.append(time.perf_counter() - begun)
            assert found[0] == found[1], found  # to the last bit
            print(f"json {seconds[0]:.2f} s, dray {seconds[1]:.2f} s: {seconds[0] / seconds[1]:.1f} times")


if __name__ == "__main__":
    main(*sys.argv[1:])
