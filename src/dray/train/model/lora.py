"""LoRA: low-rank adapters of the model's layers are trained, by peft, and merged into the model at the end."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from dray.contract.findings import ConfigError, listed
from dray.train.checkpoint import manifest
from dray.train.recipe import Lora

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add(network: Any, settings: Lora, *, task: str | None = None) -> None:  # noqa: ANN401  a transformers model
    """Add adapters in place and freeze the rest. `task` is peft's name of the objective."""
    from peft import LoraConfig  # noqa: PLC0415  seconds, and only here

    targets = settings.target_modules
    head = network.get_output_embeddings()
    linear = [
        name
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    ]
    unknown = [name for name in targets if not any(_ends(one, name) for one in linear)]
    if unknown or not linear:
        raise ConfigError(
            "lora.target_modules names layers that the model lacks"
            if linear
            else "the model has no linear layers for LoRA",
            wanted=f"ends of layer names, such as {listed(sorted({name.split('.')[-1] for name in linear}))}",
            found=", ".join(unknown) or type(network).__name__,
            fix="correct lora.target_modules, or remove it to train all linear layers but the head",
        )
    network.add_adapter(
        LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides by the rank
            lora_dropout=settings.dropout,
            target_modules=[name for name in linear if not targets or any(_ends(name, end) for end in targets)],
            fan_in_fan_out=isinstance(network.get_submodule(linear[0]), Conv1D),
            task_type=task,
        )
    )
    for weight in network.parameters():
        if weight.requires_grad:  # small changes are lost in 16 bits
            weight.data = weight.data.float()


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def on(network: Any) -> bool:  # noqa: ANN401  a transformers model
    """Whether it has adapters."""
    return bool(getattr(network, "_hf_peft_config_loaded", False))


def save_adapter(network: Any, weights: dict[str, torch.Tensor], folder: Path, base: str) -> None:  # noqa: ANN401
    """The adapters alone, as peft loads them. A base model in a folder of this machine is not named."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: weight.contiguous() for name, weight in weights.items() if ".lora_" in name}
    named = {f"base_model.model.{name.replace('.default.', '.')}": weight for name, weight in own.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter = copy(network.peft_config["default"])
    adapter.base_model_name_or_path = None if base.startswith(("/", ".")) else base or None
    adapter.save_pretrained(folder)
    manifest.seal_model(folder)


def merged(network: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """The model's own weights by their own names, with the adapters added to them."""
    adapter = network.peft_config["default"]
    found = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        layer = name.split(_BASE)[0]
        if name.endswith(f"{_BASE}weight"):
            change = weights[layer + _UP].float() @ weights[layer + _DOWN].float() * (adapter.lora_alpha / adapter.r)
            weight = (weight.float() + (change.T if adapter.fan_in_fan_out else change)).to(weight.dtype)  # noqa: PLW2901
        found[name.replace(_BASE, ".")] = weight
    return found


def plain(network: Any) -> Any:  # noqa: ANN401
    """The same model without adapters, on the meta device, to save merged weights."""
    with torch.device("meta"):
        found = type(network)(network.config)
    if getattr(network, "generation_config", None):
        found.generation_config = network.generation_config
    return found
