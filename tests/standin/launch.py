"""One rank of a training on the stand-in: `python launch.py PLAN.json`. A step that waits for the device ends it.

The waits are those that torch itself sees (set_sync_debug_mode): reads of a number, and copies from memory that is not
pinned. Where a line is written, and in evaluations and checkpoints, the host may wait.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from dray.train import __main__ as trainer
from dray.train.loop import metrics
from dray.train.loop.loop import Loop


class Nothing:
    """Trackers."""

    def __init__(self, *_: object) -> None:
        """None."""

    def log(self, *_: object) -> None:
        """No."""

    def close(self) -> None:
        """No."""


def main() -> None:
    take, spent = Loop._step, []

    def step(loop: Any, number: int, *rest: Any) -> Any:
        if number:  # the first compiles, and allocates
            torch.cuda.set_sync_debug_mode("error")
        began = time.process_time()
        try:
            return take(loop, number, *rest)
        finally:
            spent.append(time.process_time() - began)
            torch.cuda.set_sync_debug_mode("default")

    Loop._step = step  # type: ignore[method-assign]
    metrics.Trackers = Nothing  # type: ignore[misc, assignment]
    trainer.main(sys.argv[1])
    if os.environ["RANK"] == "0":
        print(f"milliseconds of CPU a step: {sorted(spent)[len(spent) // 2] * 1e3:.1f}", flush=True)
        print(f"peak: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB", flush=True)
    os._exit(0)  # as the trainer ends: destructors wait for rank 0's store, which is gone


if __name__ == "__main__":
    main()
