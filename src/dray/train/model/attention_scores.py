"""The size of attention scores: a model that will diverge, or overflow in fp16, shows it here first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dray.train.model import attention
from dray.train.objectives.base import Batch
from dray.train.parallel.base import Strategy
from dray.train.runtime import host

_NAME = "dray-observed"
_QUERIES = 128  # at a time: at 32 heads and 8,192 tokens their scores are 134 MB, and all scores would be 8.6 GB
_seen: list[torch.Tensor] = []


def _observed(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:  # noqa: ANN401
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).float().transpose(-1, -2)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    extremes = []
    for queries in query.split(_QUERIES, dim=2):
        part = (queries.float() @ keys) * scale
        extremes.append(torch.stack([-part.min(), part.max()]))
    _seen.append(torch.stack(extremes).amax(dim=0))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


attention.register(_NAME, _observed)


@torch.no_grad()
def scores(strategy: Strategy, batch: Batch) -> dict[str, list[float]]:
    """The smallest and the largest score of each layer, over all ranks: one more forward pass, of one row."""
    network: Any = strategy.network
    usual = network.config._attn_implementation
    _seen.clear()
    network.eval()
    network.set_attn_implementation(_NAME)
    try:
        with torch.compiler.set_stance("force_eager"):
            strategy.losses(batch.head().to(strategy.device))
    finally:
        network.set_attn_implementation(usual)
        network.train()
    found = torch.stack(_seen)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    least, most = -found[:, 0], found[:, 1]
    figures = host.read(least, most)
    return {"attention_min": figures[: len(least)], "attention_max": figures[len(least) :]}
