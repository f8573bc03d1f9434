"""How long two checkouts take to start, side by side: the command line, a plan, a node's start, the first step.

    .venv/bin/python benchmarks/startup.py OTHER_CHECKOUT [ROUNDS [ROUNDS_OF_FIRST_STEP]]

Both checkouts need their own .venv with the training stack. They run in turn, and who is first changes each round, so
that a machine that slows down slows both. A ratio is the median of the rounds' own; above 1 this checkout is slower.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP = ("train.steps=1", "train.warmup_steps=0", "model.config.n_layer=1")


def main() -> None:
    """One table."""
    checkouts = {"other": Path(sys.argv[1]).resolve(), "this": Path(__file__).resolve().parents[1]}
    rounds, rounds_of_step = ([*map(int, sys.argv[2:4])] + [20] * 2)[:2]
    measures = {"dray --help": _help, "dray plan": _plan, "one node to its command": _node, "first step": _step}
    print(f"{'':<24} {'other':>8} {'this':>8}   ratio, median of the rounds (lowest to highest)")
    for name, measure in measures.items():
        seconds: dict[str, list[float]] = {"other": [], "this": []}
        for number in range((rounds_of_step if measure is _step else rounds) + 1):
            for which in sorted(checkouts, reverse=bool(number % 2)):
                taken = measure(checkouts[which])
                if number:  # the first round fills caches
                    seconds[which].append(taken)
        ratios = [this / other for this, other in zip(seconds["this"], seconds["other"], strict=True)]
        middle = {which: statistics.median(times) for which, times in seconds.items()}
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{name:<24} {middle['other']:8.3f} {middle['this']:8.3f}   {spread}")


def _help(checkout: Path) -> float:
    return _timed(checkout, "--help")


def _plan(checkout: Path) -> float:
    return _timed(checkout, "plan", "recipes/smoke-cpu.toml")


def _node(checkout: Path) -> float:
    """From `dray run` to the first line of a command that is no training: plan, node.sh, runner, supervisor."""
    with tempfile.TemporaryDirectory() as runs:
        mark = Path(runs, "mark")
        begun = time.time()
        words = ["nodes=1", "ranks_per_node=1", "launcher=python", "--", "date", "+%s.%N"]
        _timed(checkout, "run", "--runs", runs, *words)
        (log,) = Path(runs).rglob("rank-0.log")
        mark.write_text(log.read_text())
        return float(mark.read_text().split()[-1]) - begun


def _step(checkout: Path) -> float:
    """From `dray run` to the end of the first step of two nodes of two ranks."""
    with tempfile.TemporaryDirectory() as runs:
        begun = time.time()
        _timed(checkout, "run", "recipes/smoke-cpu.toml", "--runs", runs, *STEP)
        (metrics,) = Path(runs).rglob("metrics.jsonl")
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
        return float(next(event["time"] for event in events if event["event"] == "step")) - begun


def _timed(checkout: Path, *words: str) -> float:
    begun = time.perf_counter()
    argv = [str(checkout / ".venv" / "bin" / "dray"), *words]
    ended = subprocess.run(  # noqa: S603  our own list
        argv, cwd=checkout, env={**os.environ, "DRAY_RUNS": ""}, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        sys.exit(f"{argv}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
