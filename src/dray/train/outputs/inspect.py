"""What a training would read: its datasets, and its first rows as the model will see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dray.contract.image_tasks import Inspect
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
        "training": [*_training(config, data.training, config.steps * config.global_size)],
        "evaluation": [*_evaluation(config, data), *_more(config, tokens)],
        "rows": [*_rows(config, data.training, objective, job.rows)],
    }
    Path(job.report).write_text(json.dumps(report), encoding="utf-8")


def _training(config: Config, feed: Feed, samples: int) -> Iterator[Table]:
    """Each dataset that is trained on; `samples` are those of the whole run."""
    if isinstance(feed, Stream):
        found = resolve.dataset(config.data.train, "train", streamed=True)
        yield {"key": "data.train", **_files(config.data.train, found), "pieces": len(feed.pieces)}
    elif isinstance(feed, Mapped):
        yield {"key": "data.train", **_dataset(config, config.data.train, feed.tokens), **_read(feed, samples)}
    elif isinstance(feed, Mixed):
        for (name, one), count in zip(feed.sources.items(), feed.mix.taken(samples), strict=True):
            own = feed.feeds[name]
            yield {
                "key": f"data.mix.{name}",
                **_dataset(config, one.dataset, own.tokens),
                **_read(own, count),
                "share": count / samples,
            }


def _read(feed: Mapped, samples: int) -> Table:
    """How often a run that takes so many samples of it reads each token."""
    return {"samples_read": samples, "epochs": samples * feed.order.length / feed.order.total}


def _evaluation(config: Config, data: Datasets) -> Iterator[Table]:
    own = config.data
    named = {VALIDATION: ("data.train", own.train, "train")}
    if own.validation:
        named[VALIDATION] = "data.validation", own.validation, "validation"
    named |= {f"{VALIDATION}-{name}": (f"data.mix.{name}", one.dataset, "train") for name, one in own.mix.items()}
    for event, tokens in data.validation.items():
        key, name, split = named[event]
        yield {"key": key, "held_out": split == "train", **_dataset(config, name, tokens, split)}
    if data.test is not None:
        yield {"key": "data.test", "held_out": False, **_dataset(config, own.test, data.test, "test")}


def _more(config: Config, tokens: Any) -> Iterator[Table]:  # noqa: ANN401  a tokenizer
    for name, one in config.evaluate.items():
        found = datasets.evaluation(config, tokens, name)
        yield {"key": f"evaluate.{name}", "held_out": False, **_dataset(config, one.dataset, found, "test")}


def _files(name: str, found: Dataset) -> Table:
    return {"dataset": name, "files": len({*found.files} - {"builtin"}), "bytes": found.size}


def _dataset(config: Config, name: str, tokens: Tokens, split: str = "train") -> Table:
    """Its size, and how long its documents are, of which max_train_samples may have cut the last."""
    length, packing = config.data.sequence_length, {}
    if isinstance(tokens, Packed):
        lengths, packing = tokens.sizes(), {"packing": {"strategy": tokens.strategy, **tokens.counts()}}
    else:
        lengths = np.diff(np.minimum(tokens.starts.astype(np.int64), len(tokens.ids)))
    lengths = np.sort(lengths[lengths > 0])
    above = np.bincount(np.ceil(np.log2(lengths)).astype(np.int64))
    return {
        **_files(name, resolve.dataset(name, split)),
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "samples": -(-tokens.total // length),
        **packing,
        "lengths": {str(1 << power): int(number) for power, number in enumerate(above) if number},
        "shortest": int(lengths[0]),
        "median": int(lengths[len(lengths) // 2]),
        "longest": int(lengths[-1]),
        "longer_than_a_sample": int((lengths > length).sum()),
    }


def _rows(config: Config, feed: Feed, objective: Objective, count: int) -> Iterator[Table]:
    """The first rows of the run, in the parts that its loss treats alike."""
    samples = range(min(count, config.steps * config.global_size))
    if not samples:
        return
    found = feed.rows(samples)
    batch, padding = objective.batch(found, samples), np.not_equal(found & PADDING, 0).sum(1).tolist()
    positions = None if batch.position_ids is None else batch.position_ids.tolist()
    names = [*config.data.mix]
    for sample, ids, labels, fill in zip(
        samples, batch.input_ids.tolist(), batch.labels.tolist(), padding, strict=True
    ):
        own = positions[sample] if positions else None
        yield {
            "sample": sample,
            "source": names[feed.mix.place(sample)[0]] if isinstance(feed, Mixed) else "",
            "input_ids": ids,
            "labels": labels,
            "position_ids": own,
            "parts": _parts(objective, ids, labels, own, fill),
        }


def _parts(
    objective: Objective, ids: list[int], labels: list[int], positions: list[int] | None, fill: int
) -> list[Table]:
    """Runs of tokens that are predicted, or that are context alone; attention ends between two documents. The last
    `fill` tokens are padding."""
    labels = [IGNORE_INDEX, *labels[:-1]] if objective.predicts_next else labels  # beside the token itself
    documents = np.cumsum(np.equal(positions, 0)).tolist() if positions else [0] * len(ids)
    kinds = [
        (document, "context" if label == IGNORE_INDEX else "predicted" if label == token else "masked")
        for document, label, token in zip(documents, labels, ids, strict=True)
    ]
    kinds[len(ids) - fill :] = [(document, "padding") for document, _ in kinds[len(ids) - fill :]]
    found, place = list[Table](), 0
    for (document, kind), group in groupby(kinds):
        end = place + len([*group])
        text, answer = (
            objective.tokenizer.decode(some, clean_up_tokenization_spaces=False)
            for some in (ids[place:end], labels[place:end] if kind == "masked" else [])
        )
        found.append({"document": document, "kind": kind, "text": text, "label": answer, "tokens": end - place})
        place = end
    return found
