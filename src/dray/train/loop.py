"""The loop: steps of forward, backward and update. What a step does is decided by its number, the seed and the rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from dray.train.config import Config
from dray.train.metrics import Metrics
from dray.train.order import Order, indices
from dray.train.parallel import Parallel, mean
from dray.train.schedule import rate
from dray.train.shards import Tokens
from dray.train.stop import EXIT_FAILED, stop


class Loop:
    """One training run from any step to its last."""

    def __init__(self, config: Config, parallel: Parallel, tokens: Tokens, metrics: Metrics) -> None:
        self.config, self.parallel, self.tokens, self.metrics = config, parallel, tokens, metrics
        self.order = Order(len(tokens.ids), config.block, config.seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._losses = torch.zeros(1, device=parallel.device)
        self._waited = 0.0

    def run(self, first: int, saved: Callable[[int], None]) -> float:
        """Take the steps from `first` on, calling `saved` after each; the seconds that it took."""
        began = last = time.monotonic()
        since = first
        self.parallel.network.train()
        for step in range(first, self.config.steps):
            norm = self._step(step)
            done = step + 1
            if done % self.config.log_every == 0 or done in (1, self.config.steps):
                now = time.monotonic()
                self._log(done, norm, done - since, now - last, (now - began) / (done - first))
                since, last = done, now
            saved(done)
        return time.monotonic() - began

    def _step(self, step: int) -> float:
        config = self.config
        # Dropout is a function of seed, step and rank: a run that is resumed draws the same numbers.
        torch.manual_seed(hash((config.seed, step, self.rank)) & (1 << 63) - 1)
        for micro in range(config.accumulation):
            rows = self._rows(step, micro)
            with self.parallel.turn(last=micro == config.accumulation - 1):
                loss = loss_of(self.parallel.logits(rows), rows)
                self.parallel.backward(loss)
            self._losses += loss.detach() / config.accumulation
        return self.parallel.update(rate(config, step))

    def _rows(self, step: int, micro: int) -> torch.Tensor:
        began = time.perf_counter()
        config = self.config
        mine = indices(
            step, micro, self.rank, world=self.world, per_device=config.per_device, accumulation=config.accumulation
        )
        rows = np.stack([self.tokens.block(self.order.start(sample), config.block) for sample in mine])
        self._waited += time.perf_counter() - began
        return torch.from_numpy(rows).to(self.parallel.device, non_blocking=True)

    def _log(self, done: int, norm: float, steps: int, seconds: float, each: float) -> None:
        config = self.config
        loss = float(mean(self._losses / steps))
        self._losses.zero_()
        if not math.isfinite(loss):
            stop(
                f"the loss at step {done} is {loss}",
                wanted="a finite loss",
                found=f"{loss}, with lr {rate(config, done - 1)} and grad_norm {norm}",
                fix="a smaller train.lr or more train.warmup_steps; check the data",
                code=EXIT_FAILED,
            )
        speed = steps * config.global_size * config.block / seconds
        left = each * (config.steps - done)
        self.metrics.write(
            "step",
            f"step {done}/{config.steps}  loss {loss:.4f}  {speed:,.0f} tokens/s  {left:.0f} s left",
            step=done,
            loss=loss,
            lr=rate(config, done - 1),
            grad_norm=norm,
            tokens=done * config.global_size * config.block,
            tokens_per_s=round(speed, 1),
            data_s=round(self._waited, 4),
            seconds_left=round(left, 1),
        )
        self._waited = 0.0


def loss_of(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens but the first of each row, which nothing foretells."""
    wanted = rows[:, 1:].flatten()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted)


@torch.no_grad()
def evaluate(config: Config, parallel: Parallel, tokens: Tokens) -> float:
    """The mean loss over every token of the documents that has one before it in its block; the last may be short."""
    parallel.network.eval()
    total, block = len(tokens.ids), config.block
    sums = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    starts = list(range(0, total, block))
    # Each rank takes as many turns, since parts of a model may be on other ranks; some come with nothing new.
    turns = -(-len(starts) // dist.get_world_size())
    for turn in range(turns):
        number = turn * dist.get_world_size() + dist.get_rank()
        start = starts[number] if number < len(starts) else 0
        length = min(block, total - start)
        rows = torch.from_numpy(tokens.block(start, length)[None]).to(parallel.device)
        logits = parallel.logits(rows)
        if number < len(starts) and length > 1:
            sums += torch.stack([loss_of(logits, rows).double() * (length - 1), sums.new_tensor(length - 1.0)])
    dist.all_reduce(sums)
    parallel.network.train()
    return float(sums[0] / sums[1])
