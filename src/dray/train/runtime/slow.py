"""Which rank is steadily slower than the others: by its own time, in which it waits for no other rank.

That is its forward passes and its waits for data. In all else of a step the ranks wait for one another, and all take as
long as the slowest. With fsdp and zero3 they do so in the forward pass too, and nobody can be named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dray.train import ranks
from dray.train.collectives import all_gather_json
from dray.train.config import Config
from dray.train.loop.metrics import Metrics

_STRATEGIES = ("ddp", "zero1", "zero2")  # whose forward pass is a rank's own
_TIMES, _WINDOWS = 1.25, 5  # so much slower than the median rank, in so many windows in a row
_WINDOW_S = 0.5  # of the median rank's own time
_EVENTS = 64  # so many of a GPU's forward passes are timed between two lines


class Slow:
    """Times of all ranks, the same on each; they are summed together with the losses of a line."""

    def __init__(self, config: Config, device: torch.device, metrics: Metrics) -> None:
        self._metrics, self._device, world = metrics, device, ranks.world()
        self.ranks = world if world > 1 and config.train.strategy in _STRATEGIES else 0
        self._hosts = all_gather_json(os.environ[config.host_variable]) if self.ranks else []
        self._own = self._ready = 0.0
        self._step, self._taken = 0, 0  # of the last line, and since the one before
        self._passes = 0
        self._events: list[tuple[Any, Any]] = []
        self._window = [0.0] * self.ranks
        self._streaks = [0] * self.ranks
        self._named: set[int] = set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the wait for data out of this rank's time."""
        began = time.perf_counter()
        yield
        self._own += time.perf_counter() - began

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Time one forward pass; on a GPU with events, without a sync."""
        self._passes += 1
        if not self.ranks:
            yield
        elif self._device.type == "cpu":
            with self.waiting():
                yield
        elif len(self._events) < _EVENTS:
            event: Any = torch.cuda.Event  # torch has no types for it
            pair = event(enable_timing=True), event(enable_timing=True)
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            yield

    def told(self) -> torch.Tensor:
        """Zeros, with this rank's time in its slot: the time until the line before."""
        told = torch.zeros(self.ranks, dtype=torch.float64, device=self._device)
        if self.ranks:
            told[ranks.rank()] = self._ready
        return told

    def nodes(self, ranks: list[float]) -> list[float]:
        """Seconds of a step on the slowest rank of each node, for the steps before the last line."""
        if self._taken <= 0 or not any(ranks):
            return []
        slowest = dict.fromkeys(self._hosts, 0.0)
        for host, own in zip(self._hosts, ranks, strict=True):
            slowest[host] = max(slowest[host], own)
        return [round(own / self._taken, 6) for own in slowest.values()]

    def see(self, ranks: list[float], step: int) -> None:
        """Take the summed times of all ranks at a line; the device has finished all work before it."""
        events, self._events = self._events, []
        timed = sum(begun.elapsed_time(ended) / 1e3 for begun, ended in events)
        self._ready = self._own + timed * (self._passes / len(events) if events else 0.0)
        self._own, self._passes = 0.0, 0
        self._taken, self._step = step - self._step if self._step else 0, step
        self._window = [before + now for before, now in zip(self._window, ranks, strict=True)]
        median = sorted(self._window)[(self.ranks - 1) // 2] if ranks else 0.0
        if median < _WINDOW_S:
            return
        for rank, own in enumerate(self._window):
            self._streaks[rank] = self._streaks[rank] + 1 if own > _TIMES * median else 0
            if self._streaks[rank] == _WINDOWS and rank not in self._named:
                self._named.add(rank)
                self._name(rank, own / median, step)
        self._window = [0.0] * self.ranks

    def _name(self, rank: int, times: float, step: int) -> None:
        self._metrics.write(
            "slow",
            f"rank {rank} on {self._hosts[rank]} is slow: its data and forward pass take {times:.2f} times "
            "as long as the median rank's",
            step=step,
            rank=rank,
            node=self._hosts[rank],
            times=round(times, 2),
        )
