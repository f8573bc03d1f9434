"""Samples by number: of one dataset on this node's disk, or of a mix of several. data/stream.py has streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dray.train.data.mix import FOREVER, Mix, Part
from dray.train.data.order import Order
from dray.train.data.packing import Packed
from dray.train.data.token_cache import Tokens
from dray.train.recipe import Source

Rows: TypeAlias = NDArray[np.int64]


class Feed(Protocol):
    """Samples by number. They are the same on any number of ranks."""

    @property
    def identity(self) -> str:
        """The dataset's identity."""

    def rows(self, samples: range) -> Rows:
        """The tokens of these samples, a row each."""

    def shares(self, samples: range) -> dict[str, float]:
        """The samples of each source, by its name; empty for a single dataset."""

    def by_source(self, samples: Iterable[int]) -> dict[str, list[int]]:
        """The source of each, and its number there."""

    def state(self) -> list[Any] | None:
        """The position from which another process resumes: of each stream shard that this rank reads, by its number."""

    def load(self, states: Mapping[int, list[Any]]) -> None:
        """Resume from the positions of all ranks that made the checkpoint."""


class Numbered:
    """A feed in which a sample's number is its position: nothing to keep, and nothing to resume from."""

    def state(self) -> None:
        return None

    def load(self, states: Mapping[int, list[Any]]) -> None:
        pass


@dataclass(frozen=True)
class Mapped(Numbered):
    """Tokens on this node's disk: any sample is found at once."""

    tokens: Tokens
    order: Order

    @property
    def identity(self) -> str:
        return f"{self.order.total} tokens{f', {self.tokens.strategy}' if isinstance(self.tokens, Packed) else ''}"

    def rows(self, samples: range) -> Rows:
        return np.stack([self.tokens.slice(self.order.start(sample), self.order.length) for sample in samples])

    def shares(self, samples: range) -> dict[str, float]:
        del samples
        return {}

    def by_source(self, samples: Iterable[int]) -> dict[str, list[int]]:
        return {"data.train": [*samples]}


class Mixed(Numbered):
    """A mix of several datasets, by weight. `step` is the samples of one step, the unit of `until`."""

    def __init__(self, sources: Mapping[str, Source], feeds: Mapping[str, Mapped], *, step: int, seed: int) -> None:
        self.sources, self.feeds = sources, feeds
        parts = [
            Part(
                one.weight,
                feeds[name].order.first(one.repeat) if one.repeat else FOREVER,
                one.until * step or FOREVER,
            )
            for name, one in sources.items()
        ]
        self.mix = Mix(parts, seed)

    @property
    def identity(self) -> str:
        """The identity of the mix: its sources, weights and limits."""
        return "; ".join(
            f"{name} of {self.feeds[name].identity}, weight {one.weight!r}"
            + f", repeat {one.repeat}" * bool(one.repeat)
            + f", until {one.until}" * bool(one.until)
            for name, one in self.sources.items()
        )

    def rows(self, samples: range) -> Rows:
        feeds = [*self.feeds.values()]
        places = [self.mix.place(sample) for sample in samples]
        return np.concatenate([feeds[source].rows(range(row, row + 1)) for source, row in places])

    def shares(self, samples: range) -> dict[str, float]:
        before, after = self.mix.taken(samples.start), self.mix.taken(samples.stop)
        found = (round((end - begin) / len(samples), 6) for begin, end in zip(before, after, strict=True))
        return dict(zip(self.sources, found, strict=True))

    def by_source(self, samples: Iterable[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {f"data.mix.{name}": [] for name in self.sources}
        rows = [*found.values()]
        for source, row in map(self.mix.place, samples):
            rows[source].append(row)
        return {name: own for name, own in found.items() if own}
