"""What is foretold: rows -> a batch with targets, and the model's loss on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from dray.train.config import Config
from dray.train.shards import IDS, LAST, WANTED

NOTHING = -100  # the target where nothing is to be foretold


@dataclass(frozen=True)
class Batch:
    """One forward pass: the tokens that go in, the one wanted at each place, and places where documents are apart."""

    rows: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None

    @property
    def wanted(self) -> int:
        """How many targets there are."""
        return int((self.targets != NOTHING).sum())

    def to(self, device: torch.device) -> Batch:
        """The same there; on a GPU it comes while others are at work."""
        if device.type == "cpu":
            return self
        rows, targets, positions = (
            None if part is None else part.pin_memory().to(device, non_blocking=True)
            for part in (self.rows, self.targets, self.positions)
        )
        assert rows is not None
        assert targets is not None
        return Batch(rows, targets, positions)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The recipe's objective with the tokenizer's numbers."""

    objective: str
    apart: bool
    share: float
    seed: int
    end: int
    mask: int
    vocabulary: int
    special: tuple[int, ...]
    marked: bool = False

    @property
    def even(self) -> bool:
        """Whether each row has as many targets as any other."""
        return self.objective == "causal" and not self.apart and not self.marked

    def batch(self, rows: NDArray[np.int64], samples: range) -> Batch:
        """The rows of those samples; what is hidden is decided by the sample's number."""
        marks, rows = rows, rows & IDS
        if self.objective == "masked":
            pairs = [self._hidden(row, sample) for row, sample in zip(rows, samples, strict=True)]
            rows, targets = (np.stack(part) for part in zip(*pairs, strict=True))
            return Batch(torch.from_numpy(rows), torch.from_numpy(targets), None)
        targets = np.full_like(rows, NOTHING)
        targets[:, :-1] = rows[:, 1:]
        if self.marked:
            targets[:, :-1][(marks[:, 1:] & WANTED) == 0] = NOTHING
        positions = None
        if self.apart:
            ends = (marks & LAST) != 0 if self.marked else rows == self.end
            targets[ends] = NOTHING  # what follows is another document
            place = np.arange(rows.shape[1])
            begins = np.zeros_like(rows)
            begins[:, 1:] = np.where(ends[:, :-1], place[1:], 0)
            positions = torch.from_numpy(place - np.maximum.accumulate(begins, axis=1))
        return Batch(torch.from_numpy(rows), torch.from_numpy(targets), positions)

    def _hidden(self, row: NDArray[np.int64], sample: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """BERT's way: of the chosen tokens 8 in 10 are hidden, 1 is any other, 1 stays."""
        chance = np.random.Generator(np.random.Philox(key=[self.seed, sample]))
        chosen = (chance.random(len(row)) < self.share) & ~np.isin(row, self.special)
        kind = chance.random(len(row))
        shown = np.where(chosen & (kind < 0.8), self.mask, row)
        shown = np.where(chosen & (kind >= 0.9), chance.integers(self.vocabulary, size=len(row)), shown)
        return shown, np.where(chosen, row, NOTHING)


def task(config: Config, words: Any, end: int) -> Task:  # noqa: ANN401  a tokenizer
    """As the recipe's [train] says."""
    return Task(
        objective=config.objective,
        apart=config.data.document_mask,
        share=config.mlm_probability,
        seed=config.seed,
        end=end,
        mask=words.mask_token_id if config.objective == "masked" else -1,
        vocabulary=len(words),
        special=tuple(words.all_special_ids),
        marked=config.objective == "sft",
    )


class Objective(torch.nn.Module):
    """The network and its loss in one forward pass, so that both are compiled, copied and parted together."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self._uncached = {"use_cache": False} if hasattr(network, "generate") else {}  # BERT knows no such word

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses of all targets; in evaluation also how many were foretold rightly, and in how many rows
        all were."""
        places = {} if positions is None else {"position_ids": positions}
        logits = self.network(input_ids=rows, **places, **self._uncached).logits.flatten(0, 1)
        wanted = targets.flatten()
        loss = functional.cross_entropy(logits.float(), wanted, reduction="sum", ignore_index=NOTHING)
        if self.network.training:
            return loss, loss.new_zeros(2)
        asked, right = targets != NOTHING, logits.argmax(1).view_as(targets) == targets
        return loss, torch.stack([right.sum(), (asked.any(1) & (right | ~asked).all(1)).sum()])
