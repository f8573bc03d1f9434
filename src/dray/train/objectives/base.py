"""Rows of tokens -> a batch with labels, and the model's loss on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dray.train.config import Config
from dray.train.data.encoding import PLAIN, Encoding, end_token
from dray.train.recipe import Evaluation

IGNORE_INDEX = -100
"""The label of a token that is not predicted."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank. `position_ids` begin anew at each document where attention stays within them."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None

    @property
    def label_count(self) -> int:
        """How many tokens are predicted."""
        return int((self.labels != IGNORE_INDEX).sum())

    def head(self) -> Batch:
        """Its first row alone."""
        return Batch(*(None if part is None else part[:1] for part in self._parts()))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        """The same on that device; a GPU receives it while it computes."""
        if device.type == "cpu":
            return self
        moved = (None if part is None else part.pin_memory().to(device, non_blocking=True) for part in self._parts())
        return Batch(*moved)  # type: ignore[arg-type]

    def _parts(self) -> tuple[torch.Tensor | None, ...]:
        return self.input_ids, self.labels, self.position_ids


class Objective(ABC):
    """Which tokens are labels. Class attributes say what the other rooms need to know of it."""

    auto_model: ClassVar[Any] = AutoModelForCausalLM
    predicts_next: ClassVar[bool] = True
    """Whether each token is predicted from those before it: such a model generates text."""
    conversations: ClassVar[bool] = False
    """Whether a document is a conversation, in the model's chat template."""
    needs_mask_token: ClassVar[bool] = False
    peft_task: ClassVar[str | None] = "CAUSAL_LM"
    encoding: ClassVar[Encoding] = PLAIN
    learned: ClassVar[str]
    """What the model learned, for its card."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
        self.config, self.tokenizer, self.end = config, tokenizer, end_token(tokenizer)

    @property
    @abstractmethod
    def even(self) -> bool:
        """Whether each row has as many labels as any other."""

    @abstractmethod
    def batch(self, rows: NDArray[np.int64], samples: range) -> Batch:
        """The rows of these samples with their labels."""

    def evaluating(self, evaluation: Evaluation) -> Objective:
        """The objective for one of [evaluate]."""
        del evaluation
        return self


class LossModule(torch.nn.Module):
    """The network and its loss in one forward pass, so that both are compiled, replicated and sharded together."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self._uncached = {"use_cache": False} if hasattr(network, "generate") else {}  # BERT has no such argument

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses of all labels; in evaluation also how many were predicted, and in how many rows all
        were."""
        positions = {} if position_ids is None else {"position_ids": position_ids}
        logits = self.network(input_ids=input_ids, **positions, **self._uncached).logits.flatten(0, 1)
        loss = functional.cross_entropy(logits.float(), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
        if self.network.training:
            return loss, loss.new_zeros(2)
        labelled, right = labels != IGNORE_INDEX, logits.argmax(1).view_as(labels) == labels
        return loss, torch.stack([right.sum(), (labelled.any(1) & (right | ~labelled).all(1)).sum()])
