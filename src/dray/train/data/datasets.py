"""The recipe's datasets: documents -> tokens -> the rows of each step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from dray.contract import node
from dray.contract.findings import ConfigError
from dray.train import objectives
from dray.train.config import Config
from dray.train.data import sources
from dray.train.data.encoding import LAST_WORD, PLAIN, Encoding, end_token
from dray.train.data.order import Order
from dray.train.data.sources import Reading
from dray.train.data.stream import Stream
from dray.train.data.token_cache import Tokens, cached, fingerprint

Rows = NDArray[np.int64]


class Feed(Protocol):
    """Samples by number. They are the same on any number of ranks."""

    @property
    def identity(self) -> str:
        """What tells this dataset from another."""

    def rows(self, samples: range) -> Rows:
        """Those samples, one a row."""

    def state(self) -> Any:  # noqa: ANN401  any JSON value
        """The position from which another process resumes; JSON, but for arrays."""

    def load(self, states: list[Any]) -> None:
        """Resume from the states of all ranks that the checkpoint was made by."""


@dataclass(frozen=True)
class Mapped:
    """Tokens on this node's disk: any sample is found at once."""

    tokens: Tokens
    order: Order

    @property
    def identity(self) -> str:
        return f"{self.order.total} tokens"

    def rows(self, samples: range) -> Rows:
        return np.stack([self.tokens.slice(self.order.start(sample), self.order.length) for sample in samples])

    def state(self) -> None:
        return None

    def load(self, states: list[Any]) -> None:
        pass


@dataclass(frozen=True)
class Datasets:
    """What a run reads. `total` tokens to train on; 0 for a stream, which nobody has counted."""

    training: Feed
    total: int
    validation: Tokens
    test: Tokens | None


def load(config: Config, tokenizer: PreTrainedTokenizerFast) -> Datasets:
    """All that the recipe's [data] names."""
    data = config.data
    if data.streaming:
        encoding, reading = _of_objective(config)
        feed: Feed = Stream(
            sources.pieces(sources.files(data.train, "train")),
            reading,
            encoding.encoder(tokenizer, end_token(tokenizer)),
            shards=config.global_size,
            length=data.sequence_length,
            seed=config.train.seed,
        )
        total = 0
    else:
        training = _read(config, tokenizer, data.train, "train")
        if not data.validation:
            training = _split(training, data.validation_split_percentage)[0]
        training = training.short(data.max_train_samples * data.sequence_length)
        total = len(_enough("training", data.train, training, data.sequence_length).ids)
        feed = Mapped(training, Order(total, data.sequence_length, config.train.seed))
    return Datasets(feed, total, validation(config, tokenizer), test(config, tokenizer))


def validation(config: Config, tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """What is evaluated during training."""
    data = config.data
    if data.validation:
        found = _read(config, tokenizer, data.validation, "validation")
    else:
        found = _split(_read(config, tokenizer, data.train, "train"), data.validation_split_percentage)[1]
    most = data.max_eval_samples * data.sequence_length
    return _enough("validation", data.validation or data.train, found.short(most), 2)


def test(config: Config, tokenizer: PreTrainedTokenizerFast) -> Tokens | None:
    """What is evaluated once, if the recipe names it."""
    data = config.data
    if not data.test:
        return None
    found = _read(config, tokenizer, data.test, "test")
    return _enough("test", data.test, found.short(data.max_eval_samples * data.sequence_length), 2)


def evaluation(config: Config, tokenizer: PreTrainedTokenizerFast, name: str) -> Tokens:
    """One of the recipe's [evaluate]."""
    one = config.evaluate[name]
    encoding, reading = _of_objective(config)
    if one.last_word or one.stride:  # of documents as they are
        encoding, reading = LAST_WORD if one.last_word else PLAIN, Reading(config.data.column)
    reading = replace(reading, column=one.column or reading.column)
    found = tokenized(sources.files(one.dataset, "test"), reading, tokenizer, cache=_cache(config), encoding=encoding)
    if one.max_samples and one.last_word:
        found = found.part(0, min(one.max_samples, len(found.starts) - 1))
    elif one.max_samples:
        found = found.short(one.max_samples * config.data.sequence_length)
    return _enough(f"evaluate.{name}", one.dataset, found, 2)


def _read(config: Config, tokenizer: PreTrainedTokenizerFast, name: str, split: str) -> Tokens:
    encoding, reading = _of_objective(config)
    return tokenized(sources.files(name, split), reading, tokenizer, cache=_cache(config), encoding=encoding)


def _of_objective(config: Config) -> tuple[Encoding, Reading]:
    data, objective = config.data, objectives.named(config.train.objective)
    chats = objective.conversations
    return objective.encoding, Reading(data.column, data.min_characters, chats=chats, answer=data.answer_column)


def _cache(config: Config) -> Path:
    return Path(config.data.cache_dir or f"{node.TOKENS}{os.getuid()}")


def tokenized(
    files: tuple[str, ...],
    reading: Reading,
    tokenizer: PreTrainedTokenizerFast,
    *,
    cache: Path,
    encoding: Encoding = PLAIN,
) -> Tokens:
    """Those files as tokens on this node's disk, made now if they are not in the cache."""

    def documents() -> Iterator[str]:
        # One rank makes them and has the whole node, while the others wait; the plan gave it the cores of one rank.
        own = os.sched_getaffinity(0)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            for piece in sources.pieces(files):
                yield from sources.documents(piece, reading)
        finally:
            os.sched_setaffinity(0, own)

    end, plain = end_token(tokenizer), encoding == PLAIN
    return cached(
        cache,
        fingerprint(
            *sources.identity(files),
            reading.column,
            reading.least,
            tokenizer.backend_tokenizer.to_str(),
            end,
            *([] if plain else [encoding.name, tokenizer.chat_template, reading.answer]),
        ),
        documents,
        encoding.encoder(tokenizer, end),
        end=end,
        vocabulary=len(tokenizer),
        marked=not plain,
        dataset=f"{files[0]}{f' and {len(files) - 1} more' * (len(files) > 1)}" if files else "",
    )


def _split(whole: Tokens, percentage: int) -> tuple[Tokens, Tokens]:
    """The last documents are for evaluation, so that they are the same on every rank."""
    count = len(whole.starts) - 1
    border = max(0, count - max(1, count * percentage // 100))
    return whole.part(0, border), whole.part(border, count)


def _enough(name: str, dataset: str, tokens: Tokens, least: int) -> Tokens:
    if len(tokens.ids) < least:
        raise ConfigError(
            f"the {name} dataset is too short",
            wanted=f"at least {least} tokens",
            found=f"{len(tokens.ids)} in {dataset}",
            fix="name a larger dataset, or set a smaller data.sequence_length or another "
            "data.validation_split_percentage",
        )
    return tokens
