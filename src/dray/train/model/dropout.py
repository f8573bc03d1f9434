"""Dropout that a compiler for CPUs can fuse.

torch's own draws its numbers one after the other, and its attention is not fused where there is dropout: half of a
compiled step on a CPU went there. Here a number follows from its place and one seed by a few integer operations, which
are compiled into the same vector loop as what is around them. On a GPU torch's own is fast.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def dropped(values: torch.Tensor, share: float) -> torch.Tensor:
    """Some of the values are 0, the others so much larger that the mean stays."""
    seed = torch.randint(-(1 << 31), (1 << 31) - 1, (), dtype=torch.int32, device=values.device)
    mixed = torch.arange(values.numel(), dtype=torch.int32, device=values.device).view(values.shape)
    # Every bit of the place and the seed changes about half of the bits of this (lowbias32, a finaliser of 32 bits).
    mixed = (mixed ^ seed) * -1640531527
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << 32 - shift) - 1))) * factor
    mixed ^= (mixed >> 16) & 0xFFFF
    kept = (mixed & 0x7FFFFFFF) >= int(share * (1 << 31))
    return torch.where(kept, values * (1 / (1 - share)), 0.0)


class Dropout(torch.nn.Module):
    """In the place of torch's."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Nothing is left out in evaluation."""
        return dropped(values, self.p) if self.training and self.p > 0 else values


def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:  # noqa: ANN401
    """SDPA's; with dropout, in the open."""
    share = options.get("dropout", 0.0)
    if not module.training or not share:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    scores = (query * (options.get("scaling") or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    if attention_mask is None and (options.get("is_causal") or getattr(module, "is_causal", True)):
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = torch.where(attention_mask, scores, float("-inf"))
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = dropped(torch.softmax(scores.float(), -1), share).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def install(network: Any) -> None:  # noqa: ANN401  a transformers model
    """In the place of each of torch's modules."""
    for module in network.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, Dropout(child.p))
