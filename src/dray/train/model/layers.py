"""The layers that repeat, with their heads and experts: torch.compile compiles each layer, and FSDP shards each."""

from __future__ import annotations

from typing import Any

import torch

_RECOMPILE_LIMIT = 64
"""Compiled forms of one layer's code: layers that differ, training and evaluation, rows of several sizes."""
# transformers' names of how many experts a layer has, and how many of them a token uses.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")


def layers(network: Any) -> list[torch.nn.Module]:  # noqa: ANN401  a transformers model
    """The modules of the first list that has as many as the configuration has layers."""
    count = network.config.get_text_config().num_hidden_layers
    lists = (module for module in network.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count)
    return [*next(lists, [])]


def heads(settings: Any) -> list[tuple[int, int]]:  # noqa: ANN401  a transformers configuration
    """The number of each layer's attention heads, and their size, which differs in Gemma 4; Mamba has none."""
    # An adopted image may have a transformers without per_layer_config.
    each = getattr(settings, "per_layer_config", None) or [settings] * settings.num_hidden_layers
    counts = [getattr(layer, "num_attention_heads", 0) for layer in each]
    return [
        (count, getattr(layer, "head_dim", None) or layer.hidden_size // count)
        for layer, count in zip(each, counts, strict=True)
        if count
    ]


def experts(settings: Any) -> tuple[int, int]:  # noqa: ANN401  a transformers configuration
    """Return how many experts a layer has, and how many of them each token uses; 1 and 1 without experts."""
    return _first(settings, _EXPERTS), _first(settings, _ACTIVE_EXPERTS)


def _first(settings: Any, names: tuple[str, ...]) -> int:  # noqa: ANN401  a transformers configuration
    """The number that a configuration has by one of these names; 1 if it has none."""
    return next(filter(None, (getattr(settings, name, None) for name in names)), 1)


def compile_each(network: torch.nn.Module) -> None:
    """Compile each layer by itself, before it is sharded: FSDP's hooks stay outside, and equal layers share code.

    Where the compiler fails, torch warns, and the layer runs without it.
    """
    from torch._dynamo import config  # noqa: PLC0415  it imports all that compiles

    config.recompile_limit = _RECOMPILE_LIMIT
    config.suppress_errors = True
    for layer in layers(network):
        layer.forward = torch.compile(layer.forward)
