"""What is learnt and what is evaluated: texts -> tokens -> the rows of each step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from dray.train import chat, sources
from dray.train.config import Config
from dray.train.order import Order
from dray.train.shards import Tokens, fingerprint, made
from dray.train.sources import Reading
from dray.train.stop import stop
from dray.train.stream import Stream
from dray.train.words import encoder, ended

_ENCODERS: dict[str, Callable[[PreTrainedTokenizerFast, int], Callable[[list[str]], list[int]]]] = {
    "all": encoder,
    "sft": chat.encoder,
    "last word": chat.last_words,
}
Rows = NDArray[np.int64]


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


def texts(config: Config, words: PreTrainedTokenizerFast) -> Texts:
    """All that the recipe's [data] names."""
    data = config.data
    if data.streaming:
        way, reading = _way(config)
        names = sources.files(data.train, "train")
        feed: Feed = Stream(
            sources.pieces(names),
            reading,
            _ENCODERS[way](words, ended(words)),
            lanes=config.global_size,
            block=data.sequence_length,
            seed=config.seed,
        )
        total = 0
    else:
        training = _read(config, words, data.train, "train")
        if not data.validation:
            training = _parted(training, data.validation_split_percentage)[0]
        training = _enough(
            "training", data.train, training.short(data.max_train_samples * data.sequence_length), data.sequence_length
        )
        total = len(training.ids)
        feed = Mapped(training, Order(total, data.sequence_length, config.seed))
    return Texts(feed, total, validation(config, words), test(config, words))


def validation(config: Config, words: PreTrainedTokenizerFast) -> Tokens:
    """What is evaluated as training goes on."""
    data = config.data
    if data.validation:
        found = _read(config, words, data.validation, "validation")
    else:
        found = _parted(_read(config, words, data.train, "train"), data.validation_split_percentage)[1]
    most = data.max_eval_samples * data.sequence_length
    return _enough("validation", data.validation or data.train, found.short(most), 2)


def test(config: Config, words: PreTrainedTokenizerFast) -> Tokens | None:
    """What is evaluated once, if the recipe names it."""
    data = config.data
    if not data.test:
        return None
    found = _read(config, words, data.test, "test")
    return _enough("test", data.test, found.short(data.max_eval_samples * data.sequence_length), 2)


def _read(config: Config, words: PreTrainedTokenizerFast, text: str, split: str) -> Tokens:
    way, reading = _way(config)
    return tokens_of(sources.files(text, split), reading, words, cache=_cache(config), way=way)


def _way(config: Config) -> tuple[str, Reading]:
    data, chats = config.data, config.objective == "sft"
    reading = Reading(data.column, data.min_characters, chats=chats, answer=data.answer_column)
    return "sft" if chats else "all", reading


def one_more(config: Config, words: PreTrainedTokenizerFast, name: str) -> Tokens:
    """One of the recipe's [evaluate]."""
    said = config.evaluate[name]
    way, reading = _way(config)
    if said.last_word or said.stride:  # of plain texts
        way, reading = "last word" if said.last_word else "all", Reading(config.data.column)
    reading = replace(reading, column=said.column or reading.column)
    found = tokens_of(sources.files(said.dataset, "test"), reading, words, cache=_cache(config), way=way)
    if said.max_samples:
        found = found.part(0, min(said.max_samples, len(found.starts) - 1)) if said.last_word else found
        found = found if said.last_word else found.short(said.max_samples * config.data.sequence_length)
    return _enough(f"evaluate.{name}", said.dataset, found, 2)


def _cache(config: Config) -> Path:
    return Path(config.data.cache_dir or f"/tmp/dray-tokens-{os.getuid()}")  # noqa: S108  a node's own, and the user's alone


def tokens_of(
    names: tuple[str, ...],
    reading: Reading,
    words: PreTrainedTokenizerFast,
    *,
    cache: Path,
    way: str = "all",
) -> Tokens:
    """Those files as tokens on this node's disk, made now if nobody has; `way` says what is marked in them."""

    def documents() -> Iterator[str]:
        # Who makes them has the whole node, while the others wait; dray's plan has one core a rank in mind.
        own = os.sched_getaffinity(0)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            for piece in sources.pieces(names):
                yield from sources.documents(piece, reading)
        finally:
            os.sched_setaffinity(0, own)

    return made(
        cache,
        fingerprint(
            *sources.identity(names),
            reading.column,
            reading.least,
            words.backend_tokenizer.to_str(),
            ended(words),
            *([way, words.chat_template, reading.answer] if way != "all" else []),
        ),
        documents,
        _ENCODERS[way](words, ended(words)),
        end=ended(words),
        vocabulary=len(words),
        marked=way != "all",
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
            fix="give more text, a smaller data.sequence_length, or another data.validation_split_percentage",
        )
    return tokens
