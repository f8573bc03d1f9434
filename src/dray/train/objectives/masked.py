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
    learned = "masked tokens"
    even = False

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(config, tokenizer)
        self._mask, self._vocabulary = tokenizer.mask_token_id, len(tokenizer)
        self._special = tuple(tokenizer.all_special_ids)

    def batch(self, rows: NDArray[np.int64], samples: range) -> Batch:
        """Of the chosen tokens 8 in 10 are masked, 1 becomes any other, 1 stays."""
        rows = rows & IDS
        inputs, labels = rows.copy(), np.full_like(rows, IGNORE_INDEX)
        for row, sample in enumerate(samples):
            generator = np.random.Generator(np.random.Philox(key=[self.config.train.seed, sample]))
            size, tokens = rows.shape[1], rows[row]
            chosen = np.less(generator.random(size), self.config.train.mlm_probability)
            chosen &= ~np.isin(tokens, self._special)
            kind = generator.random(size)
            inputs[row, chosen & (kind < 0.8)] = self._mask
            others = generator.integers(self._vocabulary, size=size)
            inputs[row] = np.where(chosen & (kind >= 0.9), others, inputs[row])
            labels[row, chosen] = tokens[chosen]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), None)


OBJECTIVE = Masked
