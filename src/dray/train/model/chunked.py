"""The head and the loss in torch, some rows of logits at a time.

Gradients are made with the loss, while a chunk's logits are there: nothing is computed twice, and no weight is needed
in the backward pass, which ZeRO-3 and FSDP gather anew. A chunk is an eighth of the rows and at most 1 GB of logits and
their gradient, 2 GB where nothing is compiled: with fewer rows adding to the weight's gradient takes longer than the
products.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from dray.train.model.entropy import cross_entropy, exact

_PARTS = 8
_LARGEST, _LARGEST_COMPILED = 1 << 27, 1 << 28


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    predicted: torch.Tensor,
    changes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    compiled: bool = False,
) -> torch.Tensor:
    """The sum of losses. It fills the buffers of likely words and gradients that are not empty."""
    of_hidden, of_weight, of_bias = changes
    wanted = any(map(len, changes))
    total = torch.zeros((), dtype=exact(hidden), device=hidden.device)
    largest = _LARGEST_COMPILED if compiled else _LARGEST
    size = max(1, min(-(-len(hidden) // _PARTS), largest // len(weight)))
    for begin in range(0, len(hidden), size):
        rows = slice(begin, begin + size)
        with torch.no_grad():
            logits = functional.linear(hidden[rows], weight, bias)
            if len(predicted):
                predicted[rows] = logits.argmax(1)
        with torch.set_grad_enabled(wanted):
            loss = cross_entropy(compiled=compiled)(logits.requires_grad_(wanted), labels[rows])
        total += loss.detach()
        if not wanted:
            continue
        (change,) = torch.autograd.grad(loss, logits)
        del logits, loss
        if len(of_hidden):
            of_hidden[rows] = (change @ weight).to(of_hidden.dtype)
        if len(of_weight):
            of_weight += change.t() @ hidden[rows]
        if len(of_bias):
            of_bias += change.sum(0, dtype=of_bias.dtype)
    return total
