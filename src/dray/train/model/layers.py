"""The layers that repeat: torch.compile compiles each, and FSDP shards each."""

from __future__ import annotations

from typing import Any

import torch

_RECOMPILE_LIMIT = 64
"""Compiled forms of one layer's code: layers that differ, training and evaluation, rows of several sizes."""


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


def compile_each(network: torch.nn.Module) -> None:
    """Compile each layer by itself, before it is sharded: FSDP's hooks stay outside, and equal layers share code.

    Where the compiler fails, torch warns, and the layer runs without it.
    """
    from torch._dynamo import config  # noqa: PLC0415  it imports all that compiles

    config.recompile_limit = _RECOMPILE_LIMIT
    config.suppress_errors = True
    for layer in layers(network):
        layer.forward = torch.compile(layer.forward)
