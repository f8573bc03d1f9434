"""Rows of tokens -> a batch with labels, and the model's loss on it."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dray.train.config import Config
from dray.train.data.encoding import PLAIN, Encoding, end_token
from dray.train.model.head import IGNORE_INDEX, ChunkedLoss, compiled_cross_entropy, cross_entropy
from dray.train.model.layers import experts
from dray.train.model.router_loss import has_routers, router_losses
from dray.train.recipe_schema import Evaluation

_BUCKETS = 16
"""The few sizes of a batch's labelled part: torch.compile compiles again for each new shape."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank. `position_ids` begin anew at each document where attention stays within them."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    labelled: torch.Tensor | None = None
    """Indices, in the flattened batch, of the tokens for which the head computes logits; None: all. Set by `to`."""

    @property
    def label_count(self) -> int:
        """How many tokens have a label."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device) -> Batch:
        """What the strategy takes, on that device; a GPU receives it while it computes."""
        batch = replace(self, labelled=_labelled(self.labels.flatten()))
        if device.type == "cpu":
            return batch
        moved = (None if part is None else part.pin_memory().to(device, non_blocking=True) for part in batch.inputs)
        return Batch(*moved)  # type: ignore[arg-type]

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """LossModule's arguments."""
        return self.input_ids, self.labels, self.position_ids, self.labelled


def _labelled(labels: torch.Tensor) -> torch.Tensor | None:
    """The tokens that are predicted, and as many others as fill a bucket."""
    ignored = labels == IGNORE_INDEX
    bucket = -(-len(labels) // _BUCKETS)
    count = max(-(-int((~ignored).sum()) // bucket), 1) * bucket
    return ignored.argsort(stable=True)[:count] if count < len(labels) else None


class Objective(ABC):
    """An objective decides which tokens are labels. Its class attributes tell the rest of dray what it needs."""

    auto_model: ClassVar[Any] = AutoModelForCausalLM
    predicts_next: ClassVar[bool] = True
    """Whether each token is predicted from those before it: such a model generates text."""
    conversations: ClassVar[bool] = False
    """Whether a document is a conversation, in the model's chat template."""
    needs_mask_token: ClassVar[bool] = False
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
    """The network and its loss in one forward pass, so that both are replicated and sharded together.

    It replaces the forward pass of the network's head, which then computes the labelled tokens alone. A chunked loss is
    returned in the place of logits: so it passes the hooks that logits pass, and the weight is whole where the strategy
    makes it whole.
    """

    def __init__(
        self,
        network: Any,  # noqa: ANN401  a transformers model
        loss: str = "full",
        dtype: torch.dtype | None = None,
        multiple: int = 1,
        *,
        compiled: bool = False,
    ) -> None:
        """`dtype` is the type of the head's products; None: that of the hidden states. The vocabulary is padded to a
        multiple of `multiple`."""
        super().__init__()
        self.network: torch.nn.Module = network
        self._chunked, self._dtype = loss == "chunked", dtype
        self._cross_entropy = compiled_cross_entropy() if compiled else cross_entropy
        # BERT has no such argument.
        self._options: dict[str, Any] = {"use_cache": False} if hasattr(network, "generate") else {}
        settings = network.config.get_text_config()
        routers = "output_router_logits" in inspect.signature(network.forward).parameters and has_routers(network)
        self._router_weight = getattr(settings, "router_aux_loss_coef", 0.0) if routers else 0.0
        _, self._active_experts = experts(settings)
        self._labels: torch.Tensor | None = None  # None outside of `forward`, as in generation
        self._places: torch.Tensor | None = None
        head = network.get_output_embeddings()
        # An analog layer computes otherwise. FSDP and DeepSpeed divide weights later: so words are counted now.
        self._vocabulary = head.out_features if type(head) is torch.nn.Linear else 0
        self._padding = -self._vocabulary % max(multiple, 1)
        if head is not None:
            self._logits_of = head.forward
            self._head = (head,)  # in a tuple torch does not register it as a second child
            head.forward = self._head_forward

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor | None,
        labelled: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses of all labels, in training with the routers'; in evaluation also how many labels the
        model predicted right, and in how many rows all."""
        options = dict(self._options)
        if position_ids is not None:
            options["position_ids"] = position_ids
        training = self.network.training
        if training and self._router_weight:
            options["output_router_logits"] = True
        self._labels, self._places = labels.flatten(), labelled
        outputs = self.network(input_ids=input_ids, **options)
        output = outputs.logits
        chosen = self._labels if labelled is None else self._labels[labelled]
        self._labels = self._places = None
        if self._chunked:
            loss, predicted = output[0, 0, 0], output[0, 0, 1:]
        else:
            logits = output.flatten(0, 1)
            if len(logits) > len(chosen):  # of a model that multiplies by the weight itself, as MobileBERT does
                logits = logits[labelled]
            loss, predicted = self._cross_entropy(logits, chosen), logits if training else logits.argmax(1)
        wanted = labels != IGNORE_INDEX
        if training:
            if self._router_weight:  # each row's counts by its labels: the loop divides the sum by those of the step
                of_rows = router_losses(outputs.router_logits, len(labels), labels.shape[1], self._active_experts)
                loss = loss + self._router_weight * (of_rows * wanted.sum(1)).sum()
            return loss, loss.new_zeros(2)
        wrong = torch.zeros_like(wanted)
        wrong.view(-1)[slice(None) if labelled is None else labelled] = predicted != chosen
        wrong &= wanted
        return loss, torch.stack([wanted.sum() - wrong.sum(), (wanted.any(1) & ~wrong.any(1)).sum()])

    def _head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if self._labels is None:
            logits = self._logits_of(hidden)
            return logits
        labels = self._labels
        if self._places is not None:
            hidden = hidden.flatten(0, -2).index_select(0, self._places)[None]
            labels = labels[self._places]
        if self._chunked:
            dtype, learns = self._dtype or hidden.dtype, torch.is_grad_enabled()
            loss, predicted = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
                hidden.flatten(0, -2), *self.padded_head(), labels, dtype, self._cross_entropy, learns
            )
            return torch.cat([loss[None], predicted.to(loss.dtype)])[None, None]
        if self._padding:
            logits = functional.linear(hidden, *self.padded_head(self._dtype))
            return logits[..., : self._vocabulary]  # a model may cap its logits, and -inf would be a number again
        logits = self._logits_of(hidden)
        return logits

    def padded_head(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, Any]:
        """The head's weight and bias, padded with zero weights and -inf bias, so that padding has probability 0."""
        weight, bias = self._head[0].weight, self._head[0].bias
        if not self._padding:
            return weight, bias
        if bias is None:
            bias = weight.new_zeros(self._vocabulary)
        rows = functional.pad(weight.to(dtype or weight.dtype), (0, 0, 0, self._padding))
        return rows, functional.pad(bias.to(rows.dtype), (0, self._padding), value=-math.inf)
