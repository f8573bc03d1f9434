"""What a training would read: its datasets, and its first rows as the model sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dray.contract.trainer.image_tasks import Inspect
from dray.train import objectives
from dray.train.config import Config, of_recipe
from dray.train.data import datasets, resolve, tokenizer
from dray.train.data.datasets import VALIDATION, Datasets
from dray.train.data.feeds import Feed, Mapped, Mixed, Stream
from dray.train.data.packing import PADDING, Packed
from dray.train.data.resolve import Dataset
from dray.train.data.token_cache import Tokens
from dray.train.model.head import IGNORE_INDEX
from dray.train.objectives.base import Objective

Table = dict[str, Any]


def run(job: Inspect) -> None:
    """Read with the trainer's own code, so that the tokens are in the cache afterwards."""
    config = of_recipe(job.recipe)
    tokens = tokenizer.load(config)
    data = datasets.load(config, tokens)
    objective = objectives.named(config.train.objective)(config, tokens)
    config = replace(config, steps=data.steps(config))
    report = {
        "name": config.name,
        "objective": config.train.objective,
        "tokenizer": config.model.tokenizer or config.model.name or "bytes",
        "vocabulary": len(tokens),
        "sequence_length": config.data.sequence_length,
        "global_size": config.global_size,
        "steps": config.steps,
        "training": _training(config, data.training),
        "evaluation": _evaluation(config, data, tokens),
        "rows": _rows(config, data.training, objective, job.rows),
    }
    Path(job.report).write_text(json.dumps(report), encoding="utf-8")


def _training(config: Config, feed: Feed) -> list[Table]:
    """Each dataset that is trained on, and how often the run reads it."""
    name, samples = config.data.train, config.steps * config.global_size
    if isinstance(feed, Stream):
        files = _files(name, resolve.dataset(name, "train", streamed=True))
        return [{"key": "data.train", **files, "pieces": len(feed.pieces)}]
    if isinstance(feed, Mapped):
        return [_trained_dataset(config, "data.train", name, feed, samples)]
    assert isinstance(feed, Mixed)
    tables = []
    for (source, weighted), count in zip(feed.sources.items(), feed.mix.taken(samples), strict=True):
        table = _trained_dataset(config, f"data.mix.{source}", weighted.dataset, feed.feeds[source], count)
        tables.append({**table, "share": count / samples})
    return tables


def _trained_dataset(config: Config, key: str, name: str, feed: Mapped, samples: int) -> Table:
    epochs = samples * feed.order.length / feed.order.total
    return {**_dataset(config, key, name, "train", feed.tokens), "samples_read": samples, "epochs": epochs}


def _evaluation(config: Config, data: Datasets, tokenizer: Any) -> list[Table]:  # noqa: ANN401
    """Each dataset of an evaluation; `held_out` are the last documents of a dataset that is trained on."""
    recipe = config.data
    sources = {VALIDATION: ("data.train", recipe.train, "train")}
    if recipe.validation:
        sources[VALIDATION] = "data.validation", recipe.validation, "validation"
    for name, source in recipe.mix.items():
        sources[f"{VALIDATION}-{name}"] = f"data.mix.{name}", source.dataset, "train"
    tables = []
    for event, tokens in data.validation.items():
        key, name, split = sources[event]
        tables.append({**_dataset(config, key, name, split, tokens), "held_out": split == "train"})
    if data.test is not None:
        tables.append(_dataset(config, "data.test", recipe.test, "test", data.test))
    for name, evaluation in config.evaluate.items():
        tokens = datasets.evaluation(config, tokenizer, name)
        tables.append(_dataset(config, f"evaluate.{name}", evaluation.dataset, "test", tokens))
    return tables


def _files(name: str, dataset: Dataset) -> Table:
    return {"dataset": name, "files": len({*dataset.files} - {"builtin"}), "bytes": dataset.size}


def _dataset(config: Config, key: str, name: str, split: str, tokens: Tokens) -> Table:
    """Its size, and how long its documents are, of which max_train_samples may have cut the last."""
    length, packing = config.data.sequence_length, {}
    if isinstance(tokens, Packed):
        lengths, packing = tokens.sizes(), {"packing": {"strategy": tokens.strategy, **tokens.counts()}}
    else:
        lengths = np.diff(np.minimum(tokens.starts.astype(np.int64), len(tokens.ids)))
    lengths = np.sort(lengths[lengths > 0])
    return {
        "key": key,
        **_files(name, resolve.dataset(name, split)),
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "samples": -(-tokens.total // length),
        **packing,
        "shortest": int(lengths[0]),
        "median": int(lengths[len(lengths) // 2]),
        "longest": int(lengths[-1]),
        "longer_than_a_sample": int((lengths > length).sum()),
    }


def _rows(config: Config, feed: Feed, objective: Objective, count: int) -> list[Table]:
    """The first rows of the run, each split where its loss changes: predicted, masked, context or padding."""
    samples = range(min(count, config.steps * config.global_size))
    if not samples:
        return []
    ids = feed.rows(samples)
    batch, padding = objective.batch(ids, samples), np.not_equal(ids & PADDING, 0).sum(1)
    names, rows = [*config.data.mix], []
    for row, sample in enumerate(samples):
        table: Table = {
            "sample": sample,
            "source": names[feed.mix.place(sample)[0]] if isinstance(feed, Mixed) else "",
            "input_ids": batch.input_ids[row].tolist(),
            "labels": batch.labels[row].tolist(),
            "position_ids": None if batch.position_ids is None else batch.position_ids[row].tolist(),
        }
        rows.append({**table, "parts": _parts(objective, table, int(padding[row]))})
    return rows


def _parts(objective: Objective, row: Table, padding: int) -> list[Table]:
    """Runs of tokens of one document and of one kind: predicted, masked, context or, at the end, padding."""
    ids, labels = row["input_ids"], row["labels"]
    if objective.predicts_next:
        labels = [IGNORE_INDEX, *labels[:-1]]  # the label of the token before is this token
    documents = np.cumsum(np.equal(row["position_ids"] or range(1, len(ids) + 1), 0)).tolist()
    kinds = []
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if place >= len(ids) - padding:
            kind = "padding"
        elif label == IGNORE_INDEX:
            kind = "context"
        else:
            kind = "predicted" if label == token else "masked"
        kinds.append((documents[place], kind))
    parts, begin = list[Table](), 0
    for (document, kind), group in groupby(kinds):
        end = begin + len([*group])
        text, label = (
            objective.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
            for tokens in (ids[begin:end], labels[begin:end] if kind == "masked" else [])
        )
        parts.append({"document": document, "kind": kind, "text": text, "label": label, "tokens": end - begin})
        begin = end
    return parts
