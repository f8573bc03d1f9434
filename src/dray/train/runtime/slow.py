"""Find ranks that are steadily slower than the others, by a rank's own time: its forward passes and waits for data.

In all else of a step ranks wait for one another, and take as long as the slowest. With fsdp and zero3 they also wait in
the forward pass, so no rank can be named.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dray.train import ranks
from dray.train.collectives import all_gather_json
from dray.train.config import Config
from dray.train.loop.metrics import Metrics

_STRATEGIES = ("ddp", "zero1", "zero2")  # whose forward pass is a rank's own
_TIMES, _WINDOWS = 1.25, 5  # a slow rank takes so many times as long as the median rank, in so many windows in a row
_WINDOW_S = 0.5  # of the median rank's own time, at least


class Slow:
    """Times of all ranks, the same on each; they are summed together with the losses of a line."""

    def __init__(self, config: Config, device: torch.device, metrics: Metrics) -> None:
        self._metrics, self._device, world = metrics, device, ranks.world()
        self.ranks = world if world > 1 and config.train.strategy in _STRATEGIES else 0
        self._hosts = all_gather_json(os.environ[config.host_variable]) if self.ranks else []
        self._seconds = 0.0  # this rank's own, since the last line
        self._last_seconds = 0.0  # the same, between the two lines before
        self._step = self._steps = 0  # the last line's step, and the steps between the two lines before
        self._events: deque[tuple[Any, Any]] = deque()  # of forward passes that the GPU may not have finished
        self._window = [0.0] * self.ranks
        self._streaks = [0] * self.ranks
        self._named: set[int] = set()

    @contextmanager
    def own_time(self) -> Iterator[None]:
        """Add the time of this block to the rank's own time."""
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Time one forward pass; on a GPU with events, without a sync."""
        if not self.ranks:
            yield
        elif self._device.type == "cpu":
            with self.own_time():
                yield
        else:
            event: Any = torch.cuda.Event  # torch has no types for it
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
            self._add_finished()

    def _add_finished(self) -> None:
        """Add the forward passes that the GPU has finished; a run that logs rarely would keep many events."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3

    def own_seconds(self) -> torch.Tensor:
        """Return a tensor for the sum over ranks: this rank's own time in its place, and zeros."""
        seconds = torch.zeros(self.ranks, dtype=torch.float64, device=self._device)
        if self.ranks:
            seconds[ranks.rank()] = self._last_seconds
        return seconds

    def nodes(self, seconds: list[float]) -> list[float]:
        """Return the own seconds of a step on each node's slowest rank, for the steps before the last line."""
        if self._steps <= 0 or not any(seconds):
            return []
        slowest = dict.fromkeys(self._hosts, 0.0)
        for host, rank_seconds in zip(self._hosts, seconds, strict=True):
            slowest[host] = max(slowest[host], rank_seconds)
        return [round(host_seconds / self._steps, 6) for host_seconds in slowest.values()]

    def observe(self, seconds: list[float], step: int) -> None:
        """Take the own times of all ranks at a line, and name slow ranks. The GPU has finished all steps before."""
        self._add_finished()
        self._last_seconds, self._seconds = self._seconds, 0.0
        self._steps, self._step = step - self._step if self._step else 0, step
        self._window = [before + now for before, now in zip(self._window, seconds, strict=True)]
        median = sorted(self._window)[(self.ranks - 1) // 2] if seconds else 0.0
        if median < _WINDOW_S:
            return
        for rank, rank_seconds in enumerate(self._window):
            self._streaks[rank] = self._streaks[rank] + 1 if rank_seconds > _TIMES * median else 0
            if self._streaks[rank] == _WINDOWS and rank not in self._named:
                self._named.add(rank)
                times = rank_seconds / median
                text = (
                    f"rank {rank} on {self._hosts[rank]} is slow: its data and forward pass take {times:.2f} times "
                    "as long as the median rank's"
                )
                self._metrics.write("slow", text, step=step, rank=rank, node=self._hosts[rank], times=round(times, 2))
        self._window = [0.0] * self.ranks
