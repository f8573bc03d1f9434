"""How well a text is foretold: block by block, by windows that overlap, or its documents' last words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from dray.train import data
from dray.train.config import Config
from dray.train.metrics import Metrics, perplexity
from dray.train.objective import NOTHING, Batch, Task
from dray.train.parallel import Parallel
from dray.train.shards import Tokens


class Window(NamedTuple):
    """A row of the text, and which of its targets count."""

    start: int
    first: int
    last: int


class Evaluator:
    """All that a recipe evaluates."""

    def __init__(
        self, config: Config, words: PreTrainedTokenizerFast, parallel: Parallel, task: Task, metrics: Metrics
    ) -> None:
        self.config, self.parallel, self.task, self.metrics = config, parallel, task, metrics
        self.found: dict[str, dict[str, float]] = {}  # the last figures by what they are of
        self._more: dict[str, tuple[Tokens, list[Window], Task, bool]] = {}
        for name, said in config.evaluate.items():
            tokens = data.one_more(config, words, name)
            windows = _documents(tokens, config) if said.last_word else _blocks(tokens, config, said.stride)
            marked = said.last_word or (task.marked and not said.stride)
            own = replace(task, marked=marked, apart=task.apart and not said.stride)
            self._more[name] = tokens, windows, own, said.last_word

    def all(self, step: int, validation: Tokens) -> None:
        """The validation text, then each of [evaluate]."""
        self.text("eval", step, validation)
        for name, (tokens, windows, task, words) in self._more.items():
            self._write(f"eval-{name}", step, self._measured(tokens, windows, task, words=words))

    def text(self, event: str, step: int, tokens: Tokens) -> None:
        """One text, block by block."""
        self._write(event, step, self._measured(tokens, _blocks(tokens, self.config, 0), self.task))

    def _write(self, event: str, step: int, found: dict[str, float]) -> None:
        name = event.replace("eval", "evaluation").replace("-", " ")
        shown = f"{name} loss {found['loss']:.4f}, perplexity {found['perplexity']:.3f}"
        self.found[event] = found
        self.metrics.write(event, shown, step=step, **found)

    @torch.no_grad()
    def _measured(self, tokens: Tokens, windows: list[Window], task: Task, *, words: bool = False) -> dict[str, float]:
        """Over every target of the windows; by words, one window is one word."""
        parallel, world = self.parallel, dist.get_world_size()
        parallel.network.eval()
        sums = torch.zeros(5, dtype=torch.float64, device=parallel.device)
        at_once = min(self.config.per_device, -(-len(windows) // world))
        # Each rank takes as many turns, since parts of a model may be on other ranks; some come with nothing new.
        for turn in range(-(-len(windows) // (at_once * world))):
            begin = (turn * world + dist.get_rank()) * at_once
            some = windows[begin : begin + at_once]
            batch = self._batch(tokens, [*some, *[Window(0, 0, 0)] * (at_once - len(some))], begin, task)
            loss, hits = parallel.losses(batch.to(parallel.device))
            asked = batch.targets != NOTHING
            counts: list[Any] = [asked.sum(), asked.any(1).sum()]
            sums += torch.stack([loss.double(), *hits.double(), *sums.new_tensor(counts)])
        dist.all_reduce(sums)
        parallel.network.train()
        losses, hit, hit_rows, wanted, wanted_rows = sums.tolist()
        hits, count = (hit_rows, wanted_rows) if words else (hit, wanted)
        loss_each = losses / max(count, 1.0)
        return {"loss": loss_each, "perplexity": perplexity(loss_each), "accuracy": hits / max(count, 1.0)}

    def _batch(self, tokens: Tokens, windows: list[Window], first: int, task: Task) -> Batch:
        """The number of a sample decides what a masked model is asked."""
        rows = np.stack([tokens.block(window.start, self.config.data.sequence_length) for window in windows])
        batch = task.batch(rows, range(first, first + len(windows)))
        for row, window in enumerate(windows):
            batch.targets[row, : window.first] = NOTHING
            batch.targets[row, window.last :] = NOTHING
        return batch


def _blocks(tokens: Tokens, config: Config, stride: int) -> list[Window]:
    """Side by side, so that every token counts that has one before it; or with a stride, so that every token counts
    once, and has as many before it as can be."""
    total, block = len(tokens.ids), config.data.sequence_length
    spare = config.objective != "masked"  # what comes after the last token is not known
    each = stride or block
    starts = range(0, max(total - block, 0) + each if stride else total, each)
    return [
        Window(start, block - stride - 1 if stride and start else 0, max(0, min(block, total - start) - spare))
        for start in starts
        if total - start > spare
    ]


def _documents(tokens: Tokens, config: Config) -> list[Window]:
    """Each document's end, as far back as a block reaches."""
    found = []
    for begin, after in zip(tokens.starts[:-1].tolist(), tokens.starts[1:].tolist(), strict=True):
        start = max(begin, after - 1 - config.data.sequence_length)
        found.append(Window(start, 0, max(0, after - 1 - start - 1)))
    return found
