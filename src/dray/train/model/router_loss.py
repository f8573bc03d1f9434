"""Models with experts: the loss that keeps their routers from choosing few of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def router_losses(router_logits: Sequence[torch.Tensor], rows: int, active: int) -> torch.Tensor:
    """The load balancing loss of each row, as transformers computes it for a batch; a token meets `active` experts.

    A batch's would depend on which rows a rank has; the mean of rows is the same on any number of ranks.
    """
    logits = torch.cat([layer.view(rows, -1, layer.shape[-1]) for layer in router_logits], dim=1)
    probabilities = logits.float().softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(active).indices, 1.0)
    return logits.shape[-1] * (chosen.mean(1) * probabilities.mean(1)).sum(-1)
