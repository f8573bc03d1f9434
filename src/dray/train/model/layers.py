"""The layers that repeat: torch.compile compiles each, and FSDP shards each."""

from __future__ import annotations

from typing import Any

import torch

_RECOMPILE_LIMIT = 64
"""Compiled forms of one layer's code: layers that differ, training and evaluation, rows of several sizes."""


def layers(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that transformers does not split over devices, in their order; else those of the outermost lists."""
    inner: set[torch.nn.Module] = set()
    repeated: list[torch.nn.Module] = []
    for module in network.modules():  # an outer list comes before its inner ones, such as a layer's experts
        if isinstance(module, torch.nn.ModuleList) and module not in inner:
            inner.update(module.modules())
            repeated.extend(module)
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [layer for layer in repeated if type(layer).__name__ in names] or repeated


def heads(settings: Any) -> list[tuple[int, int]]:  # noqa: ANN401  a transformers configuration
    """The number of each layer's attention heads, and their size, which differs in Gemma 4; Mamba has none."""
    found = []
    # An adopted image may have a transformers without this.
    for layer in getattr(settings, "per_layer_config", None) or [settings] * settings.num_hidden_layers:
        if count := getattr(layer, "num_attention_heads", 0):
            found.append((count, getattr(layer, "head_dim", None) or layer.hidden_size // count))
    return found


def compile_each(network: torch.nn.Module) -> None:
    """Compile each layer by itself, before it is sharded: FSDP's hooks stay outside, and equal layers share code.

    Where the compiler fails, torch warns, and the layer runs without it.
    """
    from torch._dynamo import config  # noqa: PLC0415  it imports all that compiles

    config.recompile_limit = _RECOMPILE_LIMIT
    config.suppress_errors = True
    for layer in layers(network):
        layer.forward = torch.compile(layer.forward)
