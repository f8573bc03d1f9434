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
from dray.train.recipe import Evaluation


class Causal(Objective):
    """`marked`: only tokens with the mark LABEL are predicted, and documents end where LAST is."""

    learned = "text as it is"
    marked = False

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(config, tokenizer)
        self.document_mask = config.data.document_mask
        self.padded = config.data.packing != "wrapped"

    @property
    def even(self) -> bool:
        return not self.document_mask and not self.marked and not self.padded

    def batch(self, rows: NDArray[np.int64], samples: range) -> Batch:
        del samples
        marks, rows = rows, rows & IDS
        padding = (marks & PADDING) != 0
        labels = np.full_like(rows, IGNORE_INDEX)
        labels[:, :-1] = rows[:, 1:]
        if self.marked:
            labels[:, :-1][(marks[:, 1:] & LABEL) == 0] = IGNORE_INDEX
        labels[:, :-1][padding[:, 1:]] = IGNORE_INDEX
        positions = None
        if self.document_mask:
            ends = (marks & LAST) != 0 if self.marked else (rows == self.end) & ~padding
            labels[ends] = IGNORE_INDEX  # what follows is another document
            place = np.arange(rows.shape[1])
            begins = np.zeros_like(rows)
            begins[:, 1:] = np.where(ends[:, :-1], place[1:], 0)
            positions = torch.from_numpy(place - np.maximum.accumulate(begins, axis=1))
        return Batch(torch.from_numpy(rows), torch.from_numpy(labels), positions)

    def evaluating(self, evaluation: Evaluation) -> Objective:
        """Windows that overlap read over the ends of documents."""
        found = copy(self)
        found.marked = evaluation.last_word or (self.marked and not evaluation.stride)
        found.document_mask = self.document_mask and not evaluation.stride
        return found


OBJECTIVE = Causal
