"""The model's head, the layer from hidden states to logits, and the loss: of the tokens alone that are predicted."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

IGNORE_INDEX = -100
"""The label of a token that is not predicted."""


class Head:
    """The forward pass of the output embeddings, whatever the model, and whatever strategy shards them."""

    def __init__(self, network: Any) -> None:  # noqa: ANN401  a transformers model
        self._labels: torch.Tensor | None = None  # None outside of LossModule's forward pass, as in generation
        self._places: torch.Tensor | None = None
        module = network.get_output_embeddings()
        if module is not None:
            self._forward, module.forward = module.forward, self._selected

    def expect(self, labels: torch.Tensor | None, places: torch.Tensor | None) -> None:
        """The labels of the batch that comes, and which of its tokens have one; None for all of them."""
        self._labels, self._places = labels, places

    def _selected(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._forward(hidden if self._places is None else _at(hidden, self._places)[None])
        return logits

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The sum over all labels."""
        logits, labels = self._both(logits)
        return functional.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORE_INDEX)

    def right(self, logits: torch.Tensor) -> torch.Tensor:
        """Which labels of the batch were predicted."""
        assert self._labels is not None
        logits, labels = self._both(logits)
        found = logits.argmax(1) == labels
        if self._places is not None:
            found = torch.zeros_like(self._labels, dtype=torch.bool).flatten().index_copy(0, self._places, found)
        return found.view_as(self._labels)

    def _both(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row of logits for each label."""
        assert self._labels is not None
        logits, labels = logits.flatten(0, 1), self._labels.flatten()
        if self._places is not None:
            labels = labels[self._places]
            if len(logits) != len(labels):  # a model that multiplies by the weight itself, as MobileBERT does
                logits = logits[self._places]
        return logits, labels


def _at(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return hidden.flatten(0, -2).index_select(0, places)
