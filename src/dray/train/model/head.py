"""The model's head, the layer from hidden states to logits, and the loss: of the tokens alone that are predicted.

`full` makes whole logits. `chunked` makes them in parts, and never holds a tensor of tokens x vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dray.contract.findings import ConfigError
from dray.train.model import chunked
from dray.train.model.entropy import cross_entropy, exact

IGNORE_INDEX = -100
"""The label of a token that is not predicted."""


class Head:
    """The forward pass of the output embeddings, for any model and any strategy.

    Where the loss is made in parts, that pass returns the loss in the place of logits: so it goes the way through
    hooks that logits go, and the weight is whole where the strategy makes it whole.
    """

    def __init__(
        self,
        network: Any,  # noqa: ANN401  a transformers model
        kind: str = "full",
        dtype: torch.dtype | None = None,
        multiple: int = 1,
        *,
        compiled: bool = False,
    ) -> None:
        """`dtype` is that of the products; None is that of the hidden states. They have a multiple of so many rows.

        `compiled` is for the cross entropy, which is one kernel then.
        """
        self._labels: torch.Tensor | None = None  # None outside of LossModule's forward pass, as in generation
        self._places: torch.Tensor | None = None
        self._kind, self._dtype, self._compiled = kind, dtype, compiled
        self._module = network.get_output_embeddings()
        # An analog layer computes otherwise. FSDP and DeepSpeed divide weights later: so words are counted now.
        linear = type(self._module) is torch.nn.Linear
        self._vocabulary = self._module.out_features if linear else 0
        self._padding = -self._vocabulary % max(multiple, 1)
        if self._module is not None:
            self._forward, self._module.forward = self._module.forward, self._in_place_of_it

    def expect(self, labels: torch.Tensor | None, places: torch.Tensor | None) -> None:
        """Set the next batch's labels, and the tokens that have one; None means all."""
        self._labels, self._places = labels, places

    def _in_place_of_it(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if self._labels is None:
            logits = self._forward(hidden)
            return logits
        if self._places is not None:
            hidden = hidden.flatten(0, -2).index_select(0, self._places)[None]
        if self._kind != "full":
            return self._in_parts(hidden.flatten(0, -2))
        if self._padding:
            logits = functional.linear(hidden, *self._padded(self._dtype))
            return logits[..., : self._vocabulary]  # a model may cap its logits, and -inf would be a number again
        logits = self._forward(hidden)
        return logits

    def _padded(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad with zero weights and -inf bias, so that padding has probability 0."""
        weight, bias = self._module.weight, self._module.bias
        if bias is None:
            bias = weight.new_zeros(self._vocabulary)
        weight, bias = weight.to(dtype or weight.dtype), bias.to(dtype or bias.dtype)
        rows = functional.pad(weight, (0, 0, 0, self._padding))
        return rows, functional.pad(bias, (0, self._padding), value=-math.inf)

    def _in_parts(self, hidden: torch.Tensor) -> torch.Tensor:
        """The loss; in evaluation then the word that is most likely for each token."""
        grads = torch.is_grad_enabled()
        weight_and_bias = self._padded() if self._padding else (self._module.weight, self._module.bias)
        inputs = hidden, *weight_and_bias
        wanted = [grads and one is not None and one.requires_grad for one in inputs]
        dtype, guess = self._dtype or hidden.dtype, not self._module.training
        loss, predicted = HeadLoss.apply(  # type: ignore[no-untyped-call]
            *inputs, self._chosen_labels(), dtype, wanted, guess, self._compiled
        )
        return torch.cat([loss[None], predicted.to(loss.dtype)])[None, None]

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The sum over all labels."""
        if self._kind != "full":
            return logits[0, 0, 0]
        return cross_entropy(compiled=self._compiled)(self._rows(logits), self._chosen_labels())

    def right(self, logits: torch.Tensor) -> torch.Tensor:
        """The labels of the batch that the model predicted right."""
        assert self._labels is not None
        predicted = self._rows(logits).argmax(1) if self._kind == "full" else logits[0, 0, 1:]
        found = predicted == self._chosen_labels()
        if self._places is not None:
            found = torch.zeros_like(self._labels, dtype=torch.bool).flatten().index_copy(0, self._places, found)
        return found.view_as(self._labels)

    def _chosen_labels(self) -> torch.Tensor:
        assert self._labels is not None
        labels = self._labels.flatten()
        return labels if self._places is None else labels[self._places]

    def _rows(self, logits: torch.Tensor) -> torch.Tensor:
        """One for each label."""
        logits = logits.flatten(0, 1)
        if self._places is None or len(logits) == len(self._places):
            return logits
        return logits[self._places]  # of a model that multiplies by the weight itself, as MobileBERT does


class HeadLoss(torch.autograd.Function):
    """The sum of losses, and the likely words if `guess`; the gradients that are `wanted` are made with them.

    Nothing of the logits is kept, and the backward pass only scales the gradients.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401  those of `head_loss`
        loss, predicted, *changes = head_loss(*arguments)
        ctx.wanted = arguments[5]
        ctx.save_for_backward(*changes)
        ctx.mark_non_differentiable(predicted)
        return loss, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss: torch.Tensor, _: Any) -> tuple[Any, ...]:  # noqa: ANN401  torch's own
        kept = zip(ctx.saved_tensors, ctx.wanted, strict=True)
        # In place: a head's gradient in 32 bits is 1 GB for Llama 1B.
        return *(change.mul_(loss) if asked else None for change, asked in kept), *[None] * 5


def head_loss(  # noqa: PLR0917  autograd passes them by position
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    dtype: torch.dtype,
    wanted: Sequence[bool],
    guess: bool,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of losses, the likely words, and the gradients of hidden states, weight and bias; what is not asked for
    is empty."""
    predicted = labels.new_zeros(labels.shape if guess else (0,))
    inputs, shapes = (hidden, weight, weight), (hidden.shape, weight.shape, weight.shape[:1])
    types = hidden.dtype, exact(hidden), exact(hidden)  # each row of hidden states' gradient is written once
    changes = [
        hidden.new_zeros(shape if asked else (0,), dtype=kept)
        for shape, asked, kept in zip(shapes, wanted, types, strict=True)
    ]
    with torch.autocast(hidden.device.type, enabled=False):
        loss = chunked.compute(
            hidden.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            labels,
            predicted=predicted,
            changes=(changes[0], changes[1], changes[2]),
            compiled=compiled,
        )
    given = [change.to(tensor.dtype) for change, tensor in zip(changes, inputs, strict=True)]
    return loss, predicted, given[0], given[1], given[2]


@torch.no_grad()
def check(network: Any, kind: str) -> None:  # noqa: ANN401  a transformers model
    """Refuse a loss in parts where the model's logits are more than a linear layer: some scale or cap them."""
    if kind == "full":
        return
    head, problem = network.get_output_embeddings(), ""
    found = type(head)
    if found is not torch.nn.Linear:
        problem = f"its head is {'unknown' if head is None else found.__name__}"
    else:
        sample = torch.tensor([[[-1000.125, 1 + 2**-20]]])
        usual, training = head.forward, network.training
        head.forward = lambda _: sample
        try:
            logits = network.eval()(input_ids=torch.tensor([[1, 2]])).logits
        finally:
            head.forward = usual
            network.train(training)
        if not torch.equal(logits, sample):
            problem = "it changes logits after its head"
    if problem:
        raise ConfigError(
            f"train.loss = {kind} does not compute this model's loss",
            wanted="a model whose logits are the output of a torch.nn.Linear",
            found=f"{network.config.model_type}: {problem}",
            fix="train.loss=full",
        )
