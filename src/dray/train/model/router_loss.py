"""Models with experts: the loss that keeps their routers from choosing few of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dray.contract.findings import ConfigError


def has_routers(network: torch.nn.Module) -> bool:
    """Return whether a layer makes router logits; some families also have dense models."""
    # transformers names the class of such layers.
    named = [(getattr(module, "_can_record_outputs", None) or {}).get("router_logits") for module in network.modules()]
    recorders = [one for some in named if some for one in (some if isinstance(some, list) else [some])]
    classes = tuple(getattr(recorder, "target_class", recorder) for recorder in recorders)
    return any(isinstance(module, classes) for module in network.modules())


def router_losses(router_logits: Sequence[torch.Tensor], rows: int, length: int, active: int) -> torch.Tensor:
    """Return the load balancing loss of each row, as transformers computes it for a batch.

    `active` experts compute each token. A batch's loss would depend on which rows a rank has; the mean of rows is the
    same on any number of ranks.
    """
    for layer in router_logits:
        if layer.numel() != rows * length * layer.shape[-1]:
            raise ConfigError(
                "dray cannot compute the router loss of this model",
                wanted=f"router logits of each layer for {rows} x {length} tokens",
                found=f"a tensor of {tuple(layer.shape)}",
                fix="model.config.router_aux_loss_coef=0",
            )
    logits = torch.cat([layer.view(rows, -1, layer.shape[-1]) for layer in router_logits], dim=1)
    probabilities = logits.float().softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(active).indices, 1.0)
    return logits.shape[-1] * (chosen.mean(1) * probabilities.mean(1)).sum(-1)
