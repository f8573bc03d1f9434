"""Losses that jump or are not finite: which steps, and which samples of which sources they had."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

from dray.train.data.order import indices
from dray.train.manifest import natural

if TYPE_CHECKING:
    from dray.train.config import Config
    from dray.train.data.feeds import Feed

MOST = 3
"""How often a run goes back."""
_LINES, _LEAST = 32, 8
_TIMES = 8.0  # standard deviations, as the median's own deviation tells them: outliers move it little
_NOISE = 0.01  # of the median; lines may agree by chance
_SHOWN = 6  # ranges


class Watch:
    """The losses of the log's last lines. Every rank has the same, and finds the same."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_LINES)
        self._high = False

    def jumped(self, loss: float) -> float | None:
        """The median of the lines before, where this loss is far above; of several such lines the first says so."""
        before, found = [*self._losses], None
        self._losses.append(loss)
        if len(before) >= _LEAST:
            middle = median(before)
            deviation = 1.4826 * median(abs(one - middle) for one in before)
            high = loss > middle + _TIMES * max(deviation, _NOISE * abs(middle))
            found = middle if high and not self._high else None
            self._high = high
        return found


def samples(feed: Feed, config: Config, steps: range, ranks: Iterable[int], world: int) -> dict[str, list[list[int]]]:
    """The first and last of each row of samples that these ranks had in these steps (from 0), by source."""
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


def left_out(skipped: list[list[int]], step: int) -> bool:
    """Whether the run goes on without this step."""
    return any(first <= step <= last for first, last in skipped)


def count(skipped: list[list[int]], until: int) -> int:
    """How many of the first steps were left out."""
    return len({step for first, last in skipped for step in range(first, min(last, until) + 1)})


def is_skipped(found: Any) -> bool:  # noqa: ANN401  any JSON value
    """Whether a manifest's steps to leave out are some."""
    return isinstance(found, list) and len(found) <= MOST and all(map(_is_pair, found))


def _is_pair(found: Any) -> bool:  # noqa: ANN401  any JSON value
    match found:
        case [first, last]:
            return natural(first) and natural(last) and 0 < first <= last
    return False
