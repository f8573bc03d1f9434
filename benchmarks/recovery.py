"""From kill -9 of a rank to the next trained step, on this machine: two nodes of one rank.

    .venv/bin/python benchmarks/recovery.py [ROUNDS]

Each round kills another rank, at another step. The time is measured from the kill, so it has what it took to notice it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "ranks_per_node=1", "preflight.when=never", "max_restarts=1", "train.steps=200", "train.log_every=1",
    "checkpoint.every=10", "model.config.n_layer=2",
)  # fmt: skip


def events(run: Path) -> list[dict[str, Any]]:
    """The whole lines of its metrics so far."""
    file = run / "attempt-1" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def until_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Wait for a line of metrics."""
    while max((event["step"] for event in events(run) if event["event"] == "step"), default=0) < step:
        if process.poll() is not None:
            sys.exit(f"the run ended with {process.returncode}")
        time.sleep(0.02)


def ranks(run: Path) -> list[int]:
    """Processes of the trainer itself."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if words[1:3] == [b"-m", b"dray.train"] and str(run).encode() in words[3]:
            found.append(int(file.parent.name))
    return sorted(found)


def one(folder: Path, seed: int) -> float:
    """One round: seconds from the kill to the next step."""
    chance = random.Random(seed)  # noqa: S311  no secret
    run = folder / f"run-{seed}"
    argv = [
        sys.executable,
        "-m",
        "dray",
        "run",
        ROOT / "recipes/smoke-cpu.toml",
        *WORDS,
        "--runs",
        folder,
        "--run",
        run.name,
    ]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd=folder) as process:  # noqa: S603  our own
        until_step(run, chance.randint(15, 120), process)
        victim = chance.choice(ranks(run))
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
    if process.returncode:
        sys.exit(f"the run ended with {process.returncode}")
    starts = [event["time"] for event in events(run) if event["event"] == "start" and event["time"] > killed]
    after = next(event["time"] for event in events(run) if event["event"] == "step" and event["time"] >= starts[0])
    return float(after - killed)


def main(rounds: int = 5) -> None:
    """Median, least and most of all rounds."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as made:
        times = [one(Path(made), seed) for seed in range(rounds)]
    print(f"\nkill -9 of one of two ranks, {rounds} rounds, {os.cpu_count()} cores\n")
    print("kill to the next step: ", end="")
    print(f"median {statistics.median(times):.2f} s, least {min(times):.2f} s, most {max(times):.2f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
