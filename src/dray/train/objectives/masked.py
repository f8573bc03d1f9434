"""Predict masked tokens from all others, as BERT does."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from dray.train.config import Config
from dray.train.data.token_cache import IDS
from dray.train.model.head import IGNORE_INDEX
from dray.train.objectives.base import Batch, Objective


class Masked(Objective):
    """Which tokens are masked follows from the seed and the sample's number."""

    auto_model = AutoModelForMaskedLM
    predicts_next = False
    needs_mask_token = True
    peft_task = None
    learned = "masked tokens"
    even = False

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(config, tokenizer)
        self._mask, self._vocabulary = tokenizer.mask_token_id, len(tokenizer)
        self._special = tuple(tokenizer.all_special_ids)

    def batch(self, rows: NDArray[np.int64], samples: range) -> Batch:
        pairs = [self._masked(row, sample) for row, sample in zip(rows & IDS, samples, strict=True)]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
        return Batch(inputs, labels, None)

    def _masked(self, row: NDArray[np.int64], sample: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of the chosen tokens 8 in 10 are masked, 1 becomes any other, 1 stays."""
        chance = np.random.Generator(np.random.Philox(key=[self.config.train.seed, sample]))
        chosen = (chance.random(len(row)) < self.config.train.mlm_probability) & ~np.isin(row, self._special)
        kind = chance.random(len(row))
        inputs = np.where(chosen & (kind < 0.8), self._mask, row)
        inputs = np.where(chosen & (kind >= 0.9), chance.integers(self._vocabulary, size=len(row)), inputs)
        return inputs, np.where(chosen, row, IGNORE_INDEX)


OBJECTIVE = Masked
