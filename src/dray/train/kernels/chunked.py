"""The head and the loss in plain torch, some rows of logits at a time.

Gradients are made with the loss, while a chunk's logits are there: nothing is computed twice, and no weight is needed
in the backward pass, which ZeRO-3 and FSDP gather anew. A chunk is an eighth of the rows and at most 1 GB of logits in
32 bits: with fewer rows adding to the weight's gradient takes longer than the products.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_PARTS, _LARGEST = 8, 1 << 28


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    predicted: torch.Tensor,
    changes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The sum of losses. It fills the buffers of likely words and gradients that are not empty."""
    of_hidden, of_weight, of_bias = changes
    exact = of_bias.dtype
    loss = torch.zeros((), dtype=exact, device=hidden.device)
    size = max(1, min(-(-len(hidden) // _PARTS), _LARGEST // len(weight)))
    for begin in range(0, len(hidden), size):
        rows = slice(begin, begin + size)
        place, ignored = labels[rows, None].clamp(min=0), labels[rows] < 0
        logits = functional.linear(hidden[rows], weight, bias).to(exact)
        if len(predicted):
            predicted[rows] = logits.argmax(1)
        logits -= logits.logsumexp(1, keepdim=True)
        found = logits.gather(1, place)
        loss -= found[:, 0].masked_fill(ignored, 0).sum()
        if not any(map(len, changes)):
            continue
        logits.exp_().scatter_(1, place, found.exp() - 1).masked_fill_(ignored[:, None], 0)
        change = logits.to(hidden.dtype)
        if len(of_hidden):
            of_hidden[rows] = change @ weight
        if len(of_weight):
            of_weight += change.t() @ hidden[rows]
        if len(of_bias):
            of_bias += logits.sum(0)
    return loss
