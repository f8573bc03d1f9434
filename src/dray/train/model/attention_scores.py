"""The size of attention scores: a model that will diverge, or overflow in fp16, shows it here first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dray.train.model import attention
from dray.train.objectives.base import Batch
from dray.train.parallel.base import Strategy
from dray.train.runtime import device_sync

_NAME = "dray-observed"
_largest: list[torch.Tensor] = []  # of each layer: the smallest score with its sign changed, and the largest score


def _observed(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:  # noqa: ANN401
    """SDPA's, which notes the scores of the first row."""
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    keys = key[0].repeat_interleave(query.shape[1] // key.shape[1], dim=0)
    extremes = []
    # One head at a time: at 8,192 tokens its scores are 268 MB, and those of 32 heads would be 8.6 GB.
    for head_queries, head_keys in zip(query[0], keys, strict=True):
        scores = (head_queries.float() @ head_keys.float().T) * scale
        extremes.append(torch.stack([-scores.min(), scores.max()]))
    _largest.append(torch.stack(extremes).amax(dim=0))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


attention.register(_NAME, _observed)


@torch.no_grad()
def scores(strategy: Strategy, batch: Batch) -> dict[str, list[float]]:
    """The smallest and the largest score of each layer, of one row of each rank: one more forward pass."""
    network: Any = strategy.network
    usual = network.config._attn_implementation
    _largest.clear()
    network.eval()
    network.set_attn_implementation(_NAME)
    try:
        with torch.compiler.set_stance("force_eager"):
            strategy.losses(batch.to(strategy.device))
    finally:
        network.set_attn_implementation(usual)
        network.train()
    layers = torch.stack(_largest)
    dist.all_reduce(layers, op=dist.ReduceOp.MAX)
    figures = device_sync.read(-layers[:, 0], layers[:, 1])
    return {"attention_min": figures[: len(layers)], "attention_max": figures[len(layers) :]}
