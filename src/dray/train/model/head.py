"""The loss of the model's head, the layer from hidden states to logits.

`full` makes whole logits. `chunked` makes the logits of some tokens at a time, and never holds a tensor of tokens x
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dray.contract.findings import ConfigError

IGNORE_INDEX = -100
"""The label of a token that is not predicted."""
# A chunk is an eighth of the tokens, and at most 1 GB of logits with their gradient, or 2 GB if nothing is compiled.
# With smaller chunks, adding up the weight's gradient takes longer than the matrix products.
_CHUNKS = 8
_LARGEST, _LARGEST_COMPILED = 1 << 27, 1 << 28

CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which its numbers are summed, of 32 bits or more."""
    return torch.promote_types(tensor.dtype, torch.float32)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all labels."""
    return functional.cross_entropy(logits.to(sum_dtype(logits)), labels, reduction="sum")


@cache
def compiled_cross_entropy() -> CrossEntropy:
    """Return two kernels for all heads, which read and write 16 bits; plain torch makes each step in 32.

    From the second number of tokens on, they are compiled for any.
    """
    return torch.compile(cross_entropy)


class ChunkedLoss(torch.autograd.Function):
    """The sum of losses of a linear layer's logits; without gradients also the most likely word of each token.

    The gradients are made with the loss, while the logits are there: nothing is computed twice, and the backward pass
    needs no weight, which ZeRO-3 and FSDP would gather again.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any,  # noqa: ANN401  torch's own
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        dtype: torch.dtype,
        loss_of: CrossEntropy,
        learns: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needed = [learns and needed for needed in ctx.needs_input_grad]
        sums = sum_dtype(hidden)
        of_hidden = torch.zeros_like(hidden) if needed[0] else None
        of_weight = torch.zeros_like(weight, dtype=sums) if needed[1] else None
        of_bias = torch.zeros_like(bias, dtype=sums) if bias is not None and needed[2] else None
        loss = torch.zeros((), dtype=sums, device=hidden.device)
        predicted = labels.new_zeros(0 if learns else len(labels))
        largest = _LARGEST if loss_of is cross_entropy else _LARGEST_COMPILED
        size = max(1, min(-(-len(hidden) // _CHUNKS), largest // len(weight)))
        with torch.autocast(hidden.device.type, enabled=False):
            inputs, table = hidden.to(dtype), weight.to(dtype)
            offset = None if bias is None else bias.to(dtype)
            for begin in range(0, len(hidden), size):
                rows = slice(begin, begin + size)
                logits = functional.linear(inputs[rows], table, offset)
                if not learns:
                    predicted[rows] = logits.argmax(1)
                    loss += loss_of(logits, labels[rows])
                    continue
                with torch.enable_grad():
                    chunk_loss = loss_of(logits.requires_grad_(), labels[rows])
                (gradient,) = torch.autograd.grad(chunk_loss, logits)
                loss += chunk_loss.detach()
                del logits, chunk_loss
                if of_hidden is not None:
                    of_hidden[rows] = (gradient @ table).to(hidden.dtype)
                if of_weight is not None:
                    of_weight += gradient.t() @ inputs[rows]
                if of_bias is not None:
                    of_bias += gradient.sum(0, dtype=sums)
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return loss, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401  torch's own
        # In place: a head's gradient in 32 bits is 1 GB for Llama 1B.
        gradients = [None if gradient is None else gradient.mul_(loss) for gradient in ctx.saved_tensors]
        return *gradients, None, None, None, None


@torch.no_grad()
def check(network: Any, loss: str) -> None:  # noqa: ANN401  a transformers model
    """Refuse a chunked loss where the model's logits are more than a linear layer: some scale or cap them."""
    head = network.get_output_embeddings()
    if loss == "full" or (type(head) is torch.nn.Linear and _returns_its_output(network, head)):
        return
    raise ConfigError(
        f"train.loss = {loss} does not compute this model's loss",
        wanted="a model whose logits are the output of a torch.nn.Linear",
        found=f"{network.config.model_type}, which changes logits after its head, or has a head of another kind",
        fix="train.loss=full",
    )


def _returns_its_output(network: Any, head: torch.nn.Module) -> bool:  # noqa: ANN401  a transformers model
    logits = torch.tensor([[[-1000.125, 1 + 2**-20]]])
    hook, training = head.register_forward_hook(lambda *_: logits), network.training
    network.eval()  # in training analog layers would learn from these tokens
    try:
        return torch.equal(network(input_ids=torch.tensor([[1, 2]])).logits, logits)
    finally:
        hook.remove()
        network.train(training)
