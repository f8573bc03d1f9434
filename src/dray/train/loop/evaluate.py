"""Loss, perplexity and accuracy of a dataset: sample by sample, by windows that overlap, or of its last words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from dray.train import ranks
from dray.train.config import Config
from dray.train.data import datasets
from dray.train.data.token_cache import Tokens
from dray.train.loop.metrics import Metrics, perplexity
from dray.train.model.head import IGNORE_INDEX
from dray.train.objectives.base import Batch, Objective
from dray.train.parallel.base import Strategy
from dray.train.runtime import host
from dray.train.runtime.heartbeat import heartbeat


class Window(NamedTuple):
    """A row of the dataset, and which of its labels count."""

    start: int
    begin: int
    end: int


class Evaluator:
    """All that a recipe evaluates."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerFast,
        strategy: Strategy,
        objective: Objective,
        metrics: Metrics,
    ) -> None:
        self.config, self.strategy, self.objective, self.metrics = config, strategy, objective, metrics
        self.found: dict[str, dict[str, float]] = {}  # the last figures of each event
        self._more: dict[str, tuple[Tokens, list[Window], Objective, bool]] = {}
        for name, one in config.evaluate.items():
            tokens = datasets.evaluation(config, tokenizer, name)
            windows = _documents(tokens, config) if one.last_word else self._windows(tokens, one.stride)
            self._more[name] = tokens, windows, objective.evaluating(one), one.last_word

    def all(self, step: int, validation: dict[str, Tokens]) -> None:
        """What is evaluated during training, by event, then each of [evaluate]."""
        found = {event: self._of(tokens) for event, tokens in validation.items()}
        if datasets.VALIDATION not in found:
            found = {datasets.VALIDATION: self._mean(found)} | found
        for event, figures in found.items():
            self._write(event, step, figures)
        for name, (tokens, windows, objective, by_word) in self._more.items():
            self._write(f"eval-{name}", step, self._measured(tokens, windows, objective, by_word=by_word))

    def dataset(self, event: str, step: int, tokens: Tokens) -> None:
        """One dataset, sample by sample."""
        self._write(event, step, self._of(tokens))

    def _of(self, tokens: Tokens) -> dict[str, float]:
        return self._measured(tokens, self._windows(tokens, 0), self.objective)

    def _mean(self, found: dict[str, dict[str, float]]) -> dict[str, float]:
        """Of a mix's sources, by weight."""
        mix = self.config.data.mix
        total = sum(one.weight for one in mix.values())
        loss, accuracy = (
            sum(one.weight / total * found[f"{datasets.VALIDATION}-{name}"][figure] for name, one in mix.items())
            for figure in ("loss", "accuracy")
        )
        return {"loss": loss, "perplexity": perplexity(loss), "accuracy": accuracy}

    def _write(self, event: str, step: int, found: dict[str, float]) -> None:
        name = event.replace("eval", "evaluation").replace("-", " ")
        shown = f"{name} loss {found['loss']:.4f}, perplexity {found['perplexity']:.3f}"
        self.found[event] = found
        self.metrics.write(event, shown, step=step, **found)

    @torch.no_grad()
    def _measured(
        self, tokens: Tokens, windows: list[Window], objective: Objective, *, by_word: bool = False
    ) -> dict[str, float]:
        """Over every label of the windows; by word, one window is one word."""
        strategy, world = self.strategy, ranks.world()
        strategy.network.eval()
        sums = torch.zeros(5, dtype=torch.float64, device=strategy.device)
        at_once = min(self.config.per_device, -(-len(windows) // world))
        # Each rank runs as many batches, since parts of a model may be on other ranks; some hold nothing new.
        for number in range(-(-len(windows) // (at_once * world))):
            heartbeat.beat()
            begin = (number * world + ranks.rank()) * at_once
            some = windows[begin : begin + at_once]
            batch = self._batch(tokens, [*some, *[Window(0, 0, 0)] * (at_once - len(some))], begin, objective)
            moved = batch.to(strategy.device)
            loss, hits = strategy.losses(moved)
            labelled = moved.labels != IGNORE_INDEX
            parts = (loss[None], hits, labelled.sum()[None], labelled.any(1).sum()[None])
            sums += torch.cat([part.double() for part in parts])
        dist.all_reduce(sums)
        strategy.network.train()
        losses, hit, hit_rows, labels, labelled_rows = host.read(sums)
        right, count = (hit_rows, labelled_rows) if by_word else (hit, labels)
        mean = losses / max(count, 1.0)
        return {"loss": mean, "perplexity": perplexity(mean), "accuracy": right / max(count, 1.0)}

    def _batch(self, tokens: Tokens, windows: list[Window], sample: int, objective: Objective) -> Batch:
        """The number of a sample decides which tokens are masked."""
        rows = np.stack([tokens.slice(window.start, self.config.data.sequence_length) for window in windows])
        batch = objective.batch(rows, range(sample, sample + len(windows)))
        for row, window in enumerate(windows):
            batch.labels[row, : window.begin] = IGNORE_INDEX
            batch.labels[row, window.end :] = IGNORE_INDEX
        return batch

    def _windows(self, tokens: Tokens, stride: int) -> list[Window]:
        return windows_of(
            tokens.total, self.config.data.sequence_length, stride, predicts_next=self.objective.predicts_next
        )


def windows_of(total: int, length: int, stride: int, predicts_next: bool) -> list[Window]:
    """Windows side by side, so that every token with one before it counts; or with a stride, so that each counts
    once, and is predicted from as many as can be."""
    each = stride or length
    starts = range(0, max(total - length, 0) + each if stride else total, each)
    return [
        # Where the next token is predicted, the last one of all has no label.
        Window(
            start, length - stride - 1 if stride and start else 0, max(0, min(length, total - start) - predicts_next)
        )
        for start in starts
        if total - start > predicts_next
    ]


def _documents(tokens: Tokens, config: Config) -> list[Window]:
    """Each document's end, as far back as a sample reaches."""
    found = []
    for begin, after in zip(tokens.starts[:-1].tolist(), tokens.starts[1:].tolist(), strict=True):
        start = max(begin, after - 1 - config.data.sequence_length)
        found.append(Window(start, 0, max(0, after - 1 - start - 1)))
    return found
