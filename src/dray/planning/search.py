"""The fastest of many candidates in few runs: coordinate descent from the recipe's own setting.

One key after another is changed alone, and a change stays if it is faster by more than both spreads. A number, the
micro-batch, is followed in a direction as long as it is not slower. If there is no room for a larger one, it is tried
with what makes room, where that can be worth its own cost. It ends when a round through all keys changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from dray.planning.tuning import ROWS, SAVERS, STRATEGY, Axis, Candidate, Space, Value


class Figure(NamedTuple):
    """A candidate's speed: the median of its steps in tokens a second, and within what distance half of them are."""

    speed: float
    spread: float
    memory: float = 0.0


Measure = Callable[[Candidate], Figure | None]
"""None: the candidate cannot run. The search asks for the same candidate often; measure it once."""


def beats(one: Figure, other: Figure) -> bool:
    """Whether `one` is faster than `other` by more than noise."""
    return one.speed - other.speed > one.spread + other.spread


def best(measured: Iterable[tuple[Candidate, Figure]], start: Candidate) -> Candidate | None:
    """Of the candidates that none beats: the one with the fewest changes, then the least memory, then the fastest."""
    every = list(measured)
    if not every:
        return None
    fastest = max((figure for _, figure in every), key=lambda figure: figure.speed)
    tied = [(candidate, figure) for candidate, figure in every if not beats(fastest, figure)]
    return min(tied, key=lambda row: (len(row[0].differences(start)), row[1].memory, -row[1].speed))[0]


def descend(space: Space, measure: Measure) -> None:
    """Measure candidates up to the fastest, from the recipe's own on, or the nearest candidate that runs."""
    search = _Search(space, measure)
    current = next((candidate for candidate in space.every() if measure(candidate)), None)
    while current:
        before = current
        for axis in space.axes:
            current = search.along(axis, current)
        current = search.with_room(current)
        if current == before:
            return


class _Search:
    def __init__(self, space: Space, measure: Measure) -> None:
        self._space, self._measure = space, measure

    def along(self, axis: Axis, current: Candidate) -> Candidate:
        """The best value of one key."""
        if not axis.ordered:
            others = (self._space.moved(current, {axis.key: value}) for value in axis.values)
            for other in filter(None, others):
                current = self._better(other, current)
            return current
        place = axis.values.index(current.get(axis.key) or axis.values[0])
        for values in (axis.values[place + 1 :], axis.values[:place][::-1]):
            began = current
            for value in values:
                other = began.changed({axis.key: value})
                figure, known = self._measure(other), self._measure(current)
                if figure is None or (known and beats(known, figure)):
                    break
                current = self._better(other, current)
            if current != began:  # the other direction is slower
                break
        return current

    def with_room(self, current: Candidate) -> Candidate:
        """Try larger micro-batches; if they do not fit, together with changes that make room."""
        axis = next((axis for axis in self._space.axes if axis.key == ROWS), None)
        larger = axis.values[axis.values.index(current.get(ROWS) or 0) + 1 :] if axis else ()
        if not axis or not larger:
            return current
        if self._measure(plain := current.changed({ROWS: larger[0]})):
            return self._better(plain, current)
        most, fastest = self._most(axis, current), current
        for changes in self._rooms(current):
            cost = math.prod(self._share(current, {key: value}) for key, value in changes.items())
            other = self._space.moved(current, {ROWS: larger[0], **changes}) if cost * most > 1 else None
            if other and self._measure(other):
                fastest = self._better(self.along(axis, other), fastest)
        return fastest

    def _rooms(self, current: Candidate) -> Iterator[Mapping[str, Value]]:
        """Changes that make room: a strategy that shards more, settings that keep less, or both."""
        strategies = next((axis.values for axis in self._space.axes if axis.key == STRATEGY), ())
        others: list[Mapping[str, Value]] = [{STRATEGY: name} for name in strategies if name != current.get(STRATEGY)]
        for strategy in ({}, *others):
            for saver in ({}, *SAVERS):
                if strategy or saver:
                    yield {**strategy, **saver}

    def _share(self, current: Candidate, change: Mapping[str, Value]) -> float:
        """The share of its speed that is left with one change, at best; 0 if it cannot run."""
        other = self._space.moved(current, change)
        figure, known = self._measure(other) if other else None, self._measure(current)
        return (figure.speed + figure.spread) / known.speed if figure and known else 0.0

    def _most(self, axis: Axis, current: Candidate) -> float:
        """The largest factor that larger micro-batches can gain: each step up helps less than the one before."""
        rows = [value for value in axis.values if isinstance(value, int)]
        place = rows.index(int(current.get(ROWS) or 0))
        most = rows[-1] / rows[place]
        known = self._measure(current)
        below = self._measure(current.changed({ROWS: rows[place - 1]})) if place else None
        if not known or not below:
            return most
        return min(most, ((known.speed + known.spread) / below.speed) ** (len(rows) - 1 - place))

    def _better(self, other: Candidate, current: Candidate) -> Candidate:
        figure, known = self._measure(other), self._measure(current)
        return other if figure and (known is None or beats(figure, known)) else current
