"""Predict each token from those before it."""

from __future__ import annotations

from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from dray.train.config import Config
from dray.train.data.packing import PADDING
from dray.train.data.token_cache import IDS, LABEL, LAST
from dray.train.model.head import IGNORE_INDEX
from dray.train.objectives.base import Batch, Objective
from dray.train.recipe_schema import Evaluation


class Causal(Objective):
    """`marked`: only tokens with the mark LABEL are predicted, and documents end where LAST is."""

    learned = "text as it is"
    marked = False

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(config, tokenizer)
        self.document_mask = config.data.document_mask

    @property
    def even(self) -> bool:
        return not (self.document_mask or self.marked or self.config.data.packing != "wrapped")

    def batch(self, rows: NDArray[np.int64], samples: range) -> Batch:
        del samples
        tokens, padding = rows & IDS, (rows & PADDING) != 0
        predicted = ~padding
        if self.marked:
            predicted &= (rows & LABEL) != 0
        ends = np.zeros_like(padding)
        if self.document_mask:
            ends = (rows & LAST) != 0 if self.marked else (tokens == self.end) & ~padding
        labels = np.full_like(rows, IGNORE_INDEX)
        # What follows the end of a document is another document.
        labels[:, :-1] = np.where(predicted[:, 1:] & ~ends[:, :-1], tokens[:, 1:], IGNORE_INDEX)
        positions = None
        if self.document_mask:
            place = np.arange(rows.shape[1])
            begins = np.zeros_like(rows)
            begins[:, 1:] = ends[:, :-1] * place[1:]
            positions = torch.from_numpy(place - np.maximum.accumulate(begins, axis=1))
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), positions)

    def evaluating(self, evaluation: Evaluation) -> Objective:
        """Windows that overlap read over the ends of documents."""
        objective = copy(self)
        objective.marked = evaluation.last_word or (self.marked and not evaluation.stride)
        objective.document_mask = self.document_mask and not evaluation.stride
        return objective


OBJECTIVE = Causal
