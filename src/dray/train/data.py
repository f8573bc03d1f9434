"""What is learnt and what is evaluated: texts -> tokens -> the rows of each step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from dray.train import sources
from dray.train.config import Config
from dray.train.order import Order
from dray.train.shards import Tokens, fingerprint, made
from dray.train.stop import stop
from dray.train.stream import Stream
from dray.train.words import encoder, ended

Rows = NDArray[np.int64]
Say = Callable[[str], None]


class Feed(Protocol):
    """Samples by number. They are the same on any number of ranks."""

    @property
    def text(self) -> str:
        """What tells this text from another."""

    def rows(self, samples: range) -> Rows:
        """Those samples, one a row."""

    def state(self) -> Any:  # noqa: ANN401  any JSON value
        """What another process needs to go on from here; JSON, but for arrays."""

    def load(self, states: list[Any]) -> None:
        """Go on from there; the states of all ranks that there were."""


@dataclass(frozen=True)
class Mapped:
    """From tokens on this node's disk: any sample is found at once."""

    tokens: Tokens
    order: Order

    @property
    def text(self) -> str:
        return f"{self.order.total} tokens"

    def rows(self, samples: range) -> Rows:
        return np.stack([self.tokens.block(self.order.start(sample), self.order.block) for sample in samples])

    def state(self) -> None:
        return None

    def load(self, states: list[Any]) -> None:
        pass


@dataclass(frozen=True)
class Texts:
    """What a run reads. `total` tokens to learn from; 0 for a stream, which nobody has counted."""

    training: Feed
    total: int
    validation: Tokens
    test: Tokens | None


def texts(config: Config, words: PreTrainedTokenizerFast, say: Say) -> Texts:
    """All that the recipe's [data] names."""
    data = config.data
    cache = Path(data.cache or f"/tmp/dray-tokens-{os.getuid()}")  # noqa: S108  a node's own, and the user's alone

    def read(text: str, split: str) -> Tokens:
        return tokens_of(
            sources.files(text, split), data.column, words, cache=cache, say=say, least=data.min_characters
        )

    if data.streaming:
        names = sources.files(data.text, "train")
        feed: Feed = Stream(
            sources.pieces(names),
            data.column,
            encoder(words),
            least=data.min_characters,
            lanes=config.global_size,
            block=data.block,
            seed=config.seed,
        )
        total, validation = 0, read(data.validation, "validation")
    else:
        training = read(data.text, "train")
        if data.validation:
            validation = read(data.validation, "validation")
        else:
            training, validation = _parted(training, data.validation_percent)
        training = _enough("training", data.text, training.short(data.samples * data.block), data.block)
        total = len(training.ids)
        feed = Mapped(training, Order(total, data.block, config.seed))
    most = data.validation_samples * data.block
    validation = _enough("validation", data.validation or data.text, validation.short(most), 2)
    test = _enough("test", data.test, read(data.test, "test").short(most), 2) if data.test else None
    return Texts(feed, total, validation, test)


def tokens_of(
    names: tuple[str, ...],
    column: str,
    words: PreTrainedTokenizerFast,
    *,
    cache: Path,
    say: Say,
    least: int = 0,
) -> Tokens:
    """Those files as tokens on this node's disk, made now if nobody has."""

    def documents() -> Iterator[str]:
        # Who makes them has the whole node, while the others wait; dray's plan has one core a rank in mind.
        own = os.sched_getaffinity(0)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            for piece in sources.pieces(names):
                yield from sources.documents(piece, column, least)
        finally:
            os.sched_setaffinity(0, own)

    return made(
        cache,
        fingerprint(*sources.identity(names), column, least, words.backend_tokenizer.to_str(), ended(words)),
        documents,
        encoder(words),
        end=ended(words),
        vocabulary=len(words),
        say=say,
    )


def _parted(whole: Tokens, percent: int) -> tuple[Tokens, Tokens]:
    """The last documents are for evaluation, so that they are the same on every rank."""
    count = len(whole.starts) - 1
    border = max(0, count - max(1, count * percent // 100))
    return whole.part(0, border), whole.part(border, count)


def _enough(name: str, text: str, tokens: Tokens, least: int) -> Tokens:
    if len(tokens.ids) < least:
        stop(
            f"the {name} text is too short",
            wanted=f"at least {least} tokens",
            found=f"{len(tokens.ids)} in {text}",
            fix="give more text, a smaller data.block, or another data.validation_percent",
        )
    return tokens
