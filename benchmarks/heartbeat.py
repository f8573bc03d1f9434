"""What a heartbeat costs: microseconds a beat, and a training's steps with and without, paired.

    .venv/bin/python benchmarks/heartbeat.py [ROUNDS]

The steps are those of a model so small that one takes some milliseconds: a share of a longer step is smaller. Each
round takes a block of steps with beats and one without, each first in turn, in one process, by the processor time
that they use; the figure is the median of the pairs.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from dray.contract import heartbeat as contract
from dray.train.runtime.heartbeat import Heartbeat

BEATS, BLOCK = 100_000, 20


def main() -> None:
    """Print the figures."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = contract.path(folder, 0)
        Path(path).write_bytes(bytes(contract.SIZE))
        os.environ[contract.VARIABLE] = path
        beating = Heartbeat()
        beating.begin(None)
        beating.enter(contract.STEP)
        each = [_beats(beating) for _ in range(9)]
        print(f"a beat: {statistics.median(each):.2f} us ({min(each):.2f} to {max(each):.2f})")
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = torch.randn(32, 256)
        pairs = []
        for number in range(rounds):
            seconds = {}
            for beats in (True, False) if number % 2 else (False, True):
                seconds[beats] = _steps(model, optimizer, batch, beating if beats else None)
            pairs.append((seconds[True] / seconds[False] - 1, seconds[False]))
    step = statistics.median(seconds for _, seconds in pairs) / BLOCK
    shares = sorted(share for share, _ in pairs)
    low, high = shares[rounds // 4], shares[rounds * 3 // 4]
    print(f"a step of {step * 1e3:.2f} ms: {statistics.median(shares):+.3%} (quartiles {low:+.3%} to {high:+.3%})")


def _beats(beating: Heartbeat) -> float:
    began = time.perf_counter()
    for step in range(BEATS):
        beating.step(step)
    return (time.perf_counter() - began) / BEATS * 1e6


def _steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, beating: Heartbeat | None
) -> float:
    began = time.process_time()
    for step in range(BLOCK):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if beating:
            beating.step(step)
    return time.process_time() - began


if __name__ == "__main__":
    main()
