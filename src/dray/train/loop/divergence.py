"""Losses that jump or are not finite: which steps, and which samples of which sources they had."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from dray.train.data.order import indices

if TYPE_CHECKING:
    from dray.train.config import Config
    from dray.train.data.feeds import Feed

MOST = 3
"""How often a run may go back."""
_LINES, _LEAST = 32, 8
_TIMES = 8.0  # standard deviations, as medians tell them: outliers move these little
_NOISE = 0.01  # of the median; lines may agree by chance
_SHOWN = 6  # ranges


class Watch:
    """The losses of the last log lines, and the steps that the run skips; the same on every rank.

    Both are in each checkpoint: a run that resumes finds the same jumps.
    """

    def __init__(self) -> None:
        self.skipped: list[list[int]] = []
        """The first and the last of each row of steps."""
        self._losses: deque[float] = deque(maxlen=_LINES)
        self._high = False

    def state(self) -> dict[str, Any]:
        """JSON that `load` understands."""
        return {"skipped": self.skipped, "losses": [*self._losses]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there; an imported checkpoint has none."""
        self.skipped, self._high = [*state.get("skipped", [])], False
        self._losses = deque(state.get("losses", []), maxlen=_LINES)

    def leaves_out(self, step: int) -> bool:
        """Whether the run goes on without this step."""
        return any(first <= step <= last for first, last in self.skipped)

    def left_out(self, until: int) -> int:
        """How many of the first `step` steps are skipped."""
        return len({step for first, last in self.skipped for step in range(first, min(last, until) + 1)})

    def jumped(self, loss: float) -> float | None:
        """The median of the lines before, if this loss is far above it; of several such lines only the first."""
        before, found = [*self._losses], None
        self._losses.append(loss)
        if len(before) >= _LEAST:
            middle = median(before)
            # From line to line, since a loss that falls is far from its median too.
            deviation = 1.4826 * median(abs(after - one) for one, after in pairwise(before))
            high = loss > middle + _TIMES * max(deviation, _NOISE * abs(middle))
            found = middle if high and not self._high else None
            self._high = high
        return found


def samples(feed: Feed, config: Config, steps: range, ranks: Iterable[int], world: int) -> dict[str, list[list[int]]]:
    """The ranges of samples of these ranks in these steps (from 0), by source."""
    each, micros = config.per_device, config.gradient_accumulation_steps
    numbers = (
        number
        for step in steps
        for micro in range(micros)
        for rank in ranks
        for number in indices(step, micro, rank, world=world, per_device=each, accumulation=micros)
    )
    return {name: _rows(own) for name, own in feed.by_source(numbers).items()}


def _rows(numbers: Iterable[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number <= found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def text(found: dict[str, list[list[int]]]) -> str:
    """`samples 8 to 15 of data.train`."""
    named = []
    for name, rows in found.items():
        shown = ", ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in rows[:_SHOWN])
        named.append(f"samples {shown}{' and more' if len(rows) > _SHOWN else ''} of {name}")
    return "; ".join(named)


def steps_text(first: int, last: int) -> str:
    """`step 7`, `steps 7 to 9`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
