"""Loss, perplexity and accuracy of a dataset: in windows side by side, in overlapping ones, or of last words alone."""

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
from dray.train.runtime import device_sync
from dray.train.runtime.heartbeat import heartbeat


class Window(NamedTuple):
    """A row of the dataset: it begins at token `start`, and its labels from `begin` to `end` count."""

    start: int
    begin: int
    end: int


class Evaluated(NamedTuple):
    """A dataset, and how it is evaluated."""

    tokens: Tokens
    windows: list[Window]
    objective: Objective
    by_word: bool = False
    """Whether each window has the labels of one word, which is right if all of its tokens are."""


class Evaluator:
    """Evaluates all datasets of a recipe. `figures` has the newest results of each event of metrics.jsonl."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerFast,
        strategy: Strategy,
        objective: Objective,
        metrics: Metrics,
    ) -> None:
        self.config, self.strategy, self.objective, self.metrics = config, strategy, objective, metrics
        self.figures: dict[str, dict[str, float]] = {}
        self._extra: dict[str, Evaluated] = {}
        length = config.data.sequence_length
        for name, evaluation in config.evaluate.items():
            tokens = datasets.evaluation(config, tokenizer, name)
            if evaluation.last_word:
                windows = windows_of_documents(tokens, length)
            else:
                windows = windows_of(tokens.total, length, evaluation.stride, predicts_next=objective.predicts_next)
            self._extra[f"eval-{name}"] = Evaluated(
                tokens, windows, objective.evaluating(evaluation), evaluation.last_word
            )

    def all(self, step: int, validation: dict[str, Tokens]) -> None:
        """Evaluate the validation datasets, each under its event, then those of [evaluate]."""
        for event, tokens in validation.items():
            self.dataset(event, step, tokens)
        if datasets.VALIDATION not in validation:
            mix = self.config.data.mix
            sources = [(source.weight, self.figures[f"{datasets.VALIDATION}-{name}"]) for name, source in mix.items()]
            total = sum(weight for weight, _ in sources)
            mean = {
                key: sum(weight * figures[key] for weight, figures in sources) / total for key in ("loss", "accuracy")
            }
            self._write(datasets.VALIDATION, step, mean | {"perplexity": perplexity(mean["loss"])})
        for event, evaluated in self._extra.items():
            self._write(event, step, self._measure(evaluated))

    def dataset(self, event: str, step: int, tokens: Tokens) -> None:
        """Evaluate one dataset in windows side by side."""
        length = self.config.data.sequence_length
        windows = windows_of(tokens.total, length, 0, predicts_next=self.objective.predicts_next)
        self._write(event, step, self._measure(Evaluated(tokens, windows, self.objective)))

    def _write(self, event: str, step: int, figures: dict[str, float]) -> None:
        name = event.replace("eval", "evaluation").replace("-", " ")
        text = f"{name} loss {figures['loss']:.4f}, perplexity {figures['perplexity']:.3f}"
        self.figures[event] = figures
        self.metrics.write(event, text, step=step, **figures)

    @torch.no_grad()
    def _measure(self, evaluated: Evaluated) -> dict[str, float]:
        """Return the mean loss of a label, or of a word, and the share that the model predicted right."""
        strategy, windows = self.strategy, evaluated.windows
        rank, world = ranks.rank(), ranks.world()
        strategy.network.eval()
        sums = torch.zeros(5, dtype=torch.float64, device=strategy.device)
        size = min(self.config.per_device, -(-len(windows) // world))
        # All ranks run as many batches, since fsdp gathers weights from all; a rank's last may have no labels.
        for begin in range(rank * size, rank * size + len(windows), size * world):
            heartbeat.beat()
            batch = self._batch(evaluated, begin, size).to(strategy.device)
            loss, hits = strategy.losses(batch)
            labelled = batch.labels != IGNORE_INDEX
            parts = (loss[None], hits, labelled.sum()[None], labelled.any(1).sum()[None])
            sums += torch.cat([part.double() for part in parts])
        dist.all_reduce(sums)
        strategy.network.train()
        losses, hit, hit_rows, labels, labelled_rows = device_sync.read(sums)
        right, count = (hit_rows, labelled_rows) if evaluated.by_word else (hit, labels)
        mean = losses / max(count, 1.0)
        return {"loss": mean, "perplexity": perplexity(mean), "accuracy": right / max(count, 1.0)}

    def _batch(self, evaluated: Evaluated, begin: int, size: int) -> Batch:
        """Return windows from `begin` on, then empty ones. A window's number decides which of its tokens are masked."""
        windows = evaluated.windows[begin : begin + size]
        windows += [Window(0, 0, 0)] * (size - len(windows))
        length = self.config.data.sequence_length
        rows = np.stack([evaluated.tokens.slice(window.start, length) for window in windows])
        batch = evaluated.objective.batch(rows, range(begin, begin + size))
        for labels, window in zip(batch.labels, windows, strict=True):
            labels[: window.begin] = IGNORE_INDEX
            labels[window.end :] = IGNORE_INDEX
        return batch


def windows_of(total: int, length: int, stride: int, *, predicts_next: bool) -> list[Window]:
    """Return windows side by side, or with a stride overlapping ones, where each token counts once: in the window that
    has most tokens before it."""
    windows = []
    end = max(total - length, 0) + stride if stride else total
    for start in range(0, end, stride or length):
        # A model that predicts the next token has no label for a window's last token.
        labels = min(length, total - start) - predicts_next
        if labels > 0:
            windows.append(Window(start, length - stride - 1 if stride and start else 0, labels))
    return windows


def windows_of_documents(tokens: Tokens, length: int) -> list[Window]:
    """Return a window for each document: its last `length` tokens."""
    windows = []
    for begin, after in zip(tokens.starts[:-1].tolist(), tokens.starts[1:].tolist(), strict=True):
        start = max(begin, after - 1 - length)
        windows.append(Window(start, 0, max(0, after - start - 2)))
    return windows
