"""Rows of tokens -> a batch with labels, and the model's loss on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dray.train.config import Config
from dray.train.data.encoding import PLAIN, Encoding, end_token
from dray.train.model.head import IGNORE_INDEX, Head
from dray.train.recipe import Evaluation

_BUCKETS = 16
"""The few sizes of a batch's labelled part: torch.compile compiles again for each new shape."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank. `position_ids` begin anew at each document where attention stays within them."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    labelled: torch.Tensor | None = None
    """Which tokens the head is for, by their places in the flattened batch; None is all of them. Set by `to`."""

    @property
    def label_count(self) -> int:
        """How many tokens are predicted."""
        return int((self.labels != IGNORE_INDEX).sum())

    def head(self) -> Batch:
        """Its first row alone."""
        return Batch(*(None if part is None else part[:1] for part in self.inputs[:3]))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        """What the strategy takes, on that device; a GPU receives it while it computes."""
        found = replace(self, labelled=_labelled(self.labels.flatten()))
        if device.type == "cpu":
            return found
        moved = (None if part is None else part.pin_memory().to(device, non_blocking=True) for part in found.inputs)
        return Batch(*moved)  # type: ignore[arg-type]

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """LossModule's arguments."""
        return self.input_ids, self.labels, self.position_ids, self.labelled


def _labelled(labels: torch.Tensor) -> torch.Tensor | None:
    """The tokens that are predicted, and as many others as fill a bucket."""
    size = -(-labels.numel() // _BUCKETS)
    predicted, other = (labels != IGNORE_INDEX).nonzero()[:, 0], (labels == IGNORE_INDEX).nonzero()[:, 0]
    missing = max(-(-len(predicted) // size), 1) * size - len(predicted)
    return torch.cat([predicted, other[:missing]]) if missing < len(other) else None


class Objective(ABC):
    """An objective decides which tokens are labels. Its class attributes tell the rest of dray what it needs."""

    auto_model: ClassVar[Any] = AutoModelForCausalLM
    predicts_next: ClassVar[bool] = True
    """Whether each token is predicted from those before it: such a model generates text."""
    conversations: ClassVar[bool] = False
    """Whether a document is a conversation, in the model's chat template."""
    needs_mask_token: ClassVar[bool] = False
    peft_task: ClassVar[str | None] = "CAUSAL_LM"
    encoding: ClassVar[Encoding] = PLAIN
    learned: ClassVar[str]
    """What the model learned, in words for its card."""

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
    """The network and its loss in one forward pass, so that both are replicated and sharded together."""

    def __init__(
        self,
        network: torch.nn.Module,
        loss: str = "full",
        dtype: torch.dtype | None = None,
        multiple: int = 1,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.network, self._head = network, Head(network, loss, dtype, multiple, compiled=compiled)
        self._uncached = {"use_cache": False} if hasattr(network, "generate") else {}  # BERT has no such argument

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor | None,
        labelled: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses of all labels; in evaluation also how many were predicted, and in how many rows all
        were."""
        positions = {} if position_ids is None else {"position_ids": position_ids}
        self._head.expect(labels, labelled)
        logits = self.network(input_ids=input_ids, **positions, **self._uncached).logits
        loss, right = self._head.loss(logits), None if self.network.training else self._head.right(logits)
        self._head.expect(None, None)
        if right is None:
            return loss, loss.new_zeros(2)
        wanted = labels != IGNORE_INDEX
        return loss, torch.stack([right.sum(), (wanted.any(1) & (right | ~wanted).all(1)).sum()])
