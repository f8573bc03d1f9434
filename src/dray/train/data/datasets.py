"""The recipe's datasets: documents -> tokens -> the rows of each step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from dray.contract import node
from dray.contract.findings import ConfigError
from dray.train import objectives
from dray.train.config import Config
from dray.train.data import formats, resolve
from dray.train.data.encoding import LAST_WORD, PLAIN, Encoding, end_token
from dray.train.data.feeds import Feed, Mapped, Mixed, Stream
from dray.train.data.formats import Reading
from dray.train.data.mapping import Map
from dray.train.data.order import Order
from dray.train.data.packing import Packed, packed
from dray.train.data.resolve import Dataset
from dray.train.data.token_cache import Tokens, cached, fingerprint
from dray.train.errors import say
from dray.train.recipe import Source

VALIDATION = "eval"
"""The event of the evaluation during training; for a source of a mix its name follows."""


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run. `total` counts training tokens with padding; 0 for a stream, which is not counted.

    `packing` has Packed.counts of them all; it is empty where documents are joined and cut.
    `validation` has its events of the metrics; VALIDATION is not among them where it is the mean of a mix's sources.
    """

    training: Feed
    total: int
    packing: dict[str, int]
    validation: dict[str, Tokens]
    test: Tokens | None
    contents: dict[str, str]
    """By the name of each dataset the SHA-256 of its tokens, or what tells a stream from another."""

    def steps(self, config: Config) -> int:
        """The number of steps, also if the recipe sets epochs."""
        return config.steps or max(1, round((config.train.epochs or 0.0) * self.total / config.step_tokens))


def load(config: Config, tokenizer: PreTrainedTokenizerFast) -> Datasets:
    """Load all datasets of the recipe's [data]."""
    data = config.data
    if data.streaming:
        encoding, reading = _of_objective(config)
        feed: Feed = Stream(
            resolve.pieces(resolve.dataset(data.train, "train", streamed=True), reading, config.global_size),
            reading,
            encoding.encoder(tokenizer, end_token(tokenizer)),
            shards=config.global_size,
            length=data.sequence_length,
            seed=config.train.seed,
        )
        feeds = dict[str, Mapped]()
    elif data.mix:
        feeds = {}
        for name, one in data.mix.items():
            tokens = _split(_source(config, tokenizer, one), data.validation_split_percentage)[0]
            feeds[name] = _mapped(config, tokenizer, f"mix.{name}", one.dataset, tokens)
        feed = Mixed(data.mix, feeds, seed=config.train.seed)
    else:
        training = _read(config, tokenizer, data.train, "train")
        if not data.validation:
            training = _split(training, data.validation_split_percentage)[0]
        feed = _mapped(config, tokenizer, "training", data.train, training)
        feeds = {"train": feed}
    total = sum(one.order.total for one in feeds.values())
    counts = [one.tokens.counts() for one in feeds.values() if isinstance(one.tokens, Packed)]
    in_all = {key: sum(one[key] for one in counts) for key in (counts[0] if counts else ())}
    evaluated, tested = validation(config, tokenizer), test(config, tokenizer)
    contents = {name: one.tokens.content for name, one in feeds.items()} or {"train": feed.identity}
    contents |= {name: one.content for name, one in evaluated.items()} | ({"test": tested.content} if tested else {})
    return Datasets(feed, total, in_all, evaluated, tested, contents)


def _mapped(config: Config, tokenizer: PreTrainedTokenizerFast, name: str, dataset: str, tokens: Tokens) -> Mapped:
    length = config.data.sequence_length
    tokens = _samples(config, tokenizer, tokens, config.data.max_train_samples)
    if isinstance(tokens, Packed):
        say(f"packing {tokens.strategy} of the {name} dataset: {tokens.summary()}")
    return Mapped(_enough(name, dataset, tokens, length), Order(tokens.total, length, config.train.seed))


def _samples(config: Config, tokenizer: PreTrainedTokenizerFast, tokens: Tokens, most: int) -> Tokens:
    """At most so many samples, packed as the recipe says."""
    data = config.data
    if data.packing != "wrapped":
        tokens = packed(tokens, data.sequence_length, data.packing, tokenizer.pad_token_id)
    return tokens.short(most * data.sequence_length)


def validation(config: Config, tokenizer: PreTrainedTokenizerFast) -> dict[str, Tokens]:
    """What is evaluated during training, by its events: one dataset, and the last documents of each source of a mix."""
    data, percentage = config.data, config.data.validation_split_percentage
    found: dict[str, Tokens] = {}

    def evaluated(name: str, dataset: str, tokens: Tokens) -> Tokens:
        return _enough(name, dataset, _samples(config, tokenizer, tokens, data.max_eval_samples), 2)

    if data.validation:
        tokens = _read(config, tokenizer, data.validation, "validation")
        found[VALIDATION] = evaluated("validation", data.validation, tokens)
    elif not data.mix:
        tokens = _split(_read(config, tokenizer, data.train, "train"), percentage)[1]
        found[VALIDATION] = evaluated("validation", data.train, tokens)
    for name, one in data.mix.items():
        tokens = _split(_source(config, tokenizer, one), percentage)[1]
        found[f"{VALIDATION}-{name}"] = evaluated(f"mix.{name} validation", one.dataset, tokens)
    return found


def test(config: Config, tokenizer: PreTrainedTokenizerFast) -> Tokens | None:
    """The test dataset, if the recipe names one."""
    data = config.data
    if not data.test:
        return None
    found = _read(config, tokenizer, data.test, "test")
    return _enough("test", data.test, _samples(config, tokenizer, found, data.max_eval_samples), 2)


def evaluation(config: Config, tokenizer: PreTrainedTokenizerFast, name: str) -> Tokens:
    """Load one dataset of the recipe's [evaluate]."""
    one = config.evaluate[name]
    encoding, reading = _of_objective(config)
    if one.last_word or one.stride:  # of documents as they are
        plain = Reading(config.data.column, config_kwargs=reading.config_kwargs)
        encoding, reading = LAST_WORD if one.last_word else PLAIN, plain
    function = Map(one.map) if one.map else None
    reading = replace(reading, column=one.column or reading.column, map=function)
    found = tokenized(resolve.dataset(one.dataset, "test"), reading, tokenizer, encoding, cache=_cache(config))
    if one.max_samples and one.last_word:
        found = found.part(0, min(one.max_samples, len(found.starts) - 1))
    elif one.stride:  # its windows overlap, and read over the ends of documents
        found = found.short(one.max_samples * config.data.sequence_length)
    elif not one.last_word:
        found = _samples(config, tokenizer, found, one.max_samples)
    return _enough(f"evaluate.{name}", one.dataset, found, 2)


def _source(config: Config, tokenizer: PreTrainedTokenizerFast, one: Source) -> Tokens:
    return _read(config, tokenizer, one.dataset, "train", column=one.column, function=one.map)


def _read(
    config: Config, tokenizer: PreTrainedTokenizerFast, name: str, split: str, *, column: str = "", function: str = ""
) -> Tokens:
    encoding, reading = _of_objective(config)
    reading = replace(reading, column=column or reading.column, map=Map(function) if function else reading.map)
    named = resolve.dataset(name, split)
    return tokenized(named, reading, tokenizer, encoding, cache=_cache(config))


def _of_objective(config: Config) -> tuple[Encoding, Reading]:
    data, objective = config.data, objectives.named(config.train.objective)
    chats = objective.conversations
    function = Map(data.map) if data.map else None
    return objective.encoding, Reading(
        data.column, data.min_characters, chats, data.answer_column, function, data.config_kwargs
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

    end, plain = end_token(tokenizer), encoding == PLAIN
    return cached(
        cache,
        fingerprint(
            *dataset.identity,
            *(json.dumps(reading.config_kwargs.get(builder), sort_keys=True) for builder in sorted(dataset.builders)),
            reading.column,
            reading.least,
            tokenizer.backend_tokenizer.to_str(),
            end,
            *([] if plain else [encoding.name, tokenizer.chat_template, reading.answer]),
            *([reading.map.text] if reading.map else []),
        ),
        documents,
        encoding.encoder(tokenizer, end),
        end=end,
        vocabulary=len(tokenizer),
        marked=not plain,
        dataset=_told(dataset.files),
    )


def _told(files: tuple[str, ...]) -> str:
    return f"{files[0]}{f' and {len(files) - 1} more' * (len(files) > 1)}" if files else ""


def _split(whole: Tokens, percentage: int) -> tuple[Tokens, Tokens]:
    """The last documents are for evaluation, so that they are the same on every rank."""
    count = len(whole.starts) - 1
    border = max(0, count - max(1, count * percentage // 100))
    return whole.part(0, border), whole.part(border, count)


def _enough(name: str, dataset: str, tokens: Tokens, least: int) -> Tokens:
    if tokens.total < least:
        raise ConfigError(
            f"the {name} dataset is too short",
            wanted=f"at least {least} tokens",
            found=f"{tokens.total} tokens in {dataset}",
            fix="name a larger dataset, or set a smaller data.sequence_length or another "
            "data.validation_split_percentage",
        )
    return tokens
