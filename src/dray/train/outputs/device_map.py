"""A saved model that is larger than one device: transformers places its layers on several, by accelerate's map."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes, get_balanced_memory

from dray.contract.findings import ConfigError, counted

_LAYER = re.compile(r"\D*\.\d+")  # not what a layer numbers itself, as its experts


def placed(shell: Any) -> dict[str, Any]:  # noqa: ANN401  a transformers model
    """What `from_pretrained` is to be given, and the map printed. `shell` is the model without its weights.

    A model that would partly go to the disk is refused: it is slow there, and the disk may be shared.
    """
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # the map says what it warns of
    shell.tie_weights()
    whole = [*(shell._no_split_modules or [])]
    most = get_balanced_memory(shell, no_split_module_classes=whole)
    chosen = infer_auto_device_map(shell, max_memory=most, no_split_module_classes=whole)
    lines = [*_lines(shell, chosen)]
    if "disk" in chosen.values():
        raise ConfigError(
            "the model does not fit into the memory of this machine",
            found="\n".join(lines),
            fix="use a machine with more memory or GPUs",
        )
    for line in lines:
        print(f"device_map: {line}", flush=True)
    return {"device_map": chosen}


def first(network: Any) -> torch.device:  # noqa: ANN401
    """Where the model takes its inputs."""
    devices = [device for device in getattr(network, "hf_device_map", {}).values() if device != "cpu"]
    return torch.device(devices[0] if devices else "cpu")


def _lines(shell: Any, chosen: dict[str, int | str]) -> Iterator[str]:  # noqa: ANN401
    """How much of the model each device has."""
    sizes = compute_module_sizes(shell)
    layers = [
        name
        for name, _ in shell.named_modules()
        if _LAYER.fullmatch(name) and not _LAYER.match(name.rpartition(".")[0])
    ]
    for device in dict.fromkeys(chosen.values()):
        own = [name for name, place in chosen.items() if place == device]
        held = [name for name in layers if any(f"{name}.".startswith(f"{one}.") or not one for one in own)]
        parts = [name for name in own if name and name not in layers]
        size = sum(sizes[name] for name in own) / 1e9
        more = f", and {', '.join(parts[:6])}" if parts else ""
        name = device if isinstance(device, str) else f"device {device}"
        yield f"{name}: {len(held)} of {counted(len(layers), 'layer')}, {size:.3g} GB{more}"
