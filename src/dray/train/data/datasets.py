"""The recipe's datasets: documents -> tokens -> the rows of each step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from dray.contract import node
from dray.contract.findings import ConfigError, listed
from dray.train import objectives
from dray.train.config import Config
from dray.train.data import formats, resolve
from dray.train.data.encoding import LAST_WORD, PLAIN, Encoding, end_token
from dray.train.data.feeds import Feed, Mapped, Mixed, Stream
from dray.train.data.formats import Map, Reading
from dray.train.data.order import Order
from dray.train.data.packing import Packed, packed
from dray.train.data.resolve import Dataset
from dray.train.data.token_cache import Tokens, cached, fingerprint
from dray.train.errors import say
from dray.train.recipe_schema import Source

VALIDATION = "eval"
"""The event of the evaluation during training; for a source of a mix its name follows."""


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run. `total` counts training tokens with padding; 0 for a stream, which is not counted.

    `packing` sums up Packed.counts of all; it is empty if documents are joined and cut.
    `validation` is by the event of the metrics. A mix without data.validation has no VALIDATION: it is then the mean of
    the sources.
    """

    training: Feed
    total: int
    packing: dict[str, int]
    validation: dict[str, Tokens]
    test: Tokens | None
    contents: dict[str, str]
    """By the name of each dataset the SHA-256 of its tokens, or the identity of a stream."""

    def steps(self, config: Config) -> int:
        """The number of steps, also if the recipe sets epochs."""
        return config.steps or max(1, round((config.train.epochs or 0.0) * self.total / config.step_tokens))


def load(config: Config, tokenizer: PreTrainedTokenizerFast) -> Datasets:
    """Load all datasets of the recipe's [data]."""
    data = config.data
    feeds: dict[str, Mapped] = {}
    if data.streaming:
        encoding, reading = _encoding_and_reading(config)
        feed: Feed = Stream(
            resolve.pieces(resolve.dataset(data.train, "train", streamed=True), reading, config.global_size),
            reading,
            encoding.encoder(tokenizer, end_token(tokenizer)),
            shards=config.global_size,
            length=data.sequence_length,
            seed=config.train.seed,
        )
    else:
        feeds = {name: _mapped(config, tokenizer, name, source) for name, source in _sources(config).items()}
        feed = Mixed(data.mix, feeds, seed=config.train.seed) if data.mix else feeds["train"]
    counts = [mapped.tokens.counts() for mapped in feeds.values() if isinstance(mapped.tokens, Packed)]
    packing = {key: sum(count[key] for count in counts) for key in (counts[0] if counts else ())}
    evaluated, tested = validation(config, tokenizer), test(config, tokenizer)
    by_name = {name: mapped.tokens for name, mapped in feeds.items()} | evaluated | ({"test": tested} if tested else {})
    contents = {name: tokens.content for name, tokens in by_name.items()}
    if data.streaming:
        contents["train"] = feed.identity
    total = sum(mapped.order.total for mapped in feeds.values())
    return Datasets(feed, total, packing, evaluated, tested, contents)


def validation(config: Config, tokenizer: PreTrainedTokenizerFast) -> dict[str, Tokens]:
    """What is evaluated during training, by its events: one dataset, and the last documents of each source of a mix."""
    data = config.data
    samples = partial(_samples, config, tokenizer, most=data.max_eval_samples, least=2)
    evaluated: dict[str, Tokens] = {}
    if data.validation:
        evaluated[VALIDATION] = samples(
            "data.validation", data.validation, _read(config, tokenizer, data.validation, "validation")
        )
    if data.mix or not data.validation:
        for name, source in _sources(config).items():
            last = _split(_read_source(config, tokenizer, source), data.validation_split_percentage)[1]
            event = f"{VALIDATION}-{name}" if data.mix else VALIDATION
            evaluated[event] = samples(f"the last documents of {_key(config, name)}", source.dataset, last)
    return evaluated


def test(config: Config, tokenizer: PreTrainedTokenizerFast) -> Tokens | None:
    """The test dataset, if the recipe names one."""
    data = config.data
    if not data.test:
        return None
    tokens = _read(config, tokenizer, data.test, "test")
    return _samples(config, tokenizer, "data.test", data.test, tokens, most=data.max_eval_samples, least=2)


def _sources(config: Config) -> dict[str, Source]:
    """The datasets of the training: those of a mix, or data.train."""
    return config.data.mix or {"train": Source(dataset=config.data.train, column="", map="", weight=1)}


def _key(config: Config, name: str) -> str:
    """The recipe's key of this source."""
    return f"data.mix.{name}" if config.data.mix else "data.train"


def _mapped(config: Config, tokenizer: PreTrainedTokenizerFast, name: str, source: Source) -> Mapped:
    data = config.data
    tokens = _read_source(config, tokenizer, source)
    if data.mix or not data.validation:
        tokens = _split(tokens, data.validation_split_percentage)[0]
    key, length = _key(config, name), data.sequence_length
    tokens = _samples(config, tokenizer, key, source.dataset, tokens, most=data.max_train_samples, least=length)
    if isinstance(tokens, Packed):
        say(f"packing {tokens.strategy} of {key}: {tokens.summary()}")
    return Mapped(tokens, Order(tokens.total, length, config.train.seed))


def _samples(
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    key: str,
    dataset: str,
    tokens: Tokens,
    *,
    most: int,
    least: int,
) -> Tokens:
    """At most so many samples, packed as the recipe says, and at least so many tokens."""
    data = config.data
    if data.packing != "wrapped":
        tokens = packed(tokens, data.sequence_length, data.packing, tokenizer.pad_token_id)
    return _enough(key, dataset, tokens.first(most * data.sequence_length), least)


def evaluation(config: Config, tokenizer: PreTrainedTokenizerFast, name: str) -> Tokens:
    """Load one dataset of the recipe's [evaluate]."""
    chosen, length = config.evaluate[name], config.data.sequence_length
    encoding, reading = _encoding_and_reading(config)
    if chosen.last_word or chosen.stride:  # of documents as they are
        encoding = LAST_WORD if chosen.last_word else PLAIN
        reading = Reading(config.data.column, config_kwargs=reading.config_kwargs)
    reading = replace(reading, column=chosen.column or reading.column, map=Map(chosen.map) if chosen.map else None)
    tokens = tokenized(resolve.dataset(chosen.dataset, "test"), reading, tokenizer, encoding, cache=_cache(config))
    key = f"evaluate.{name}"
    if not (chosen.last_word or chosen.stride):
        return _samples(config, tokenizer, key, chosen.dataset, tokens, most=chosen.max_samples, least=2)
    if chosen.stride:  # its windows overlap, and read over the ends of documents
        tokens = tokens.first(chosen.max_samples * length)
    elif chosen.max_samples:
        tokens = tokens.part(0, min(chosen.max_samples, len(tokens.starts) - 1))
    return _enough(key, chosen.dataset, tokens, 2)


def _read_source(config: Config, tokenizer: PreTrainedTokenizerFast, source: Source) -> Tokens:
    return _read(config, tokenizer, source.dataset, "train", column=source.column, function=source.map)


def _read(
    config: Config, tokenizer: PreTrainedTokenizerFast, name: str, split: str, *, column: str = "", function: str = ""
) -> Tokens:
    encoding, reading = _encoding_and_reading(config)
    reading = replace(reading, column=column or reading.column, map=Map(function) if function else reading.map)
    named = resolve.dataset(name, split)
    return tokenized(named, reading, tokenizer, encoding, cache=_cache(config))


def _encoding_and_reading(config: Config) -> tuple[Encoding, Reading]:
    data, objective = config.data, objectives.named(config.train.objective)
    is_conversation = objective.conversations
    function = Map(data.map) if data.map else None
    return objective.encoding, Reading(
        data.column, data.min_characters, is_conversation, data.answer_column, function, data.config_kwargs
    )


def _cache(config: Config) -> Path:
    return Path(config.data.cache_dir or f"{node.TOKENS}{os.getuid()}")


def tokenized(
    dataset: Dataset,
    reading: Reading,
    tokenizer: PreTrainedTokenizerFast,
    encoding: Encoding = PLAIN,
    *,
    cache: Path,
) -> Tokens:
    """The dataset as tokens on this node's disk; tokenize it if the cache does not have them."""

    def documents() -> Iterator[str]:
        # One rank makes them and has the whole node, while the others wait; the plan gave it the cores of one rank.
        own = os.sched_getaffinity(0)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            for piece in dataset.pieces(reading):
                yield from formats.documents(piece, reading)
            if reading.map:
                say(reading.map.summary)
        finally:
            os.sched_setaffinity(0, own)

    end = end_token(tokenizer)
    return cached(
        cache,
        fingerprint(
            *dataset.identity,
            *(json.dumps(reading.config_kwargs.get(builder), sort_keys=True) for builder in sorted(dataset.builders)),
            reading.column,
            reading.min_characters,
            tokenizer.backend_tokenizer.to_str(),
            end,
            encoding.name,
            tokenizer.chat_template,
            reading.answer,
            reading.map and reading.map.text,
        ),
        documents,
        encoding.encoder(tokenizer, end),
        end=end,
        vocabulary=len(tokenizer),
        marked=encoding != PLAIN,
        dataset=listed(dataset.files, most=1),
    )


def _split(whole: Tokens, percentage: int) -> tuple[Tokens, Tokens]:
    """The last documents are for evaluation, so that they are the same on every rank."""
    count = len(whole.starts) - 1
    border = max(0, count - max(1, count * percentage // 100))
    return whole.part(0, border), whole.part(border, count)


def _enough(key: str, dataset: str, tokens: Tokens, least: int) -> Tokens:
    if tokens.total < least:
        raise ConfigError(
            f"there are too few tokens in {key}",
            wanted=f"at least {least} tokens",
            found=f"{tokens.total} tokens in {dataset}",
            fix="name a larger dataset, or set a smaller data.sequence_length or another "
            "data.validation_split_percentage",
        )
    return tokens
