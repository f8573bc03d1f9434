"""A saved model that is larger than one device: transformers places its layers on several, by accelerate's map."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes, get_balanced_memory

from dray.contract.findings import ConfigError, counted

_LAYER = re.compile(r"\D*\.\d+")  # not what a layer numbers itself, as its experts


@contextmanager
def placed(shell: Any, placing: dict[str, Any]) -> Iterator[dict[str, Any]]:  # noqa: ANN401  a transformers model
    """What `from_pretrained` is to be given, and the map printed. `shell` is the model without its weights.

    What goes to the disk goes into a folder that ends with this. It is refused where none was named: a model is slow
    there, and the disk may be shared.
    """
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # the map says what it warns of
    shell.tie_weights()
    given = {int(name) if name.isdigit() else name: size for name, size in placing["max_memory"].items()} or None
    whole = [*(shell._no_split_modules or [])]
    most = get_balanced_memory(shell, max_memory=given, no_split_module_classes=whole)
    chosen = infer_auto_device_map(shell, max_memory=most, no_split_module_classes=whole)
    lines = [*_lines(shell, chosen)]
    folder = placing["offload_folder"]
    if "disk" in chosen.values() and not folder:
        raise ConfigError(
            "the model does not fit into memory, and its rest would go to the disk",
            wanted="memory for all layers, or a folder for the rest",
            found="\n".join(lines),
            fix="--offload-folder DIR, or more memory: --max-memory",
        )
    for line in lines:
        print(f"device_map: {line}", flush=True)
    with TemporaryDirectory(prefix="dray-offload-", dir=_made(folder) if folder else None) as own:
        yield {"device_map": chosen, "offload_folder": own}


def first(network: Any) -> torch.device:  # noqa: ANN401
    """Where the model takes its inputs."""
    devices = [device for device in getattr(network, "hf_device_map", {}).values() if device not in ("cpu", "disk")]
    return torch.device(devices[0] if devices else "cpu")


def _made(folder: str) -> str:
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "the offload folder cannot be created", where=folder, found=error.strerror,
            fix="--offload-folder ANOTHER",
        ) from error  # fmt: skip
    return folder


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
