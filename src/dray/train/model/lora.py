"""LoRA: low-rank adapters of the model's layers are trained, by peft, and merged into the model at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from dray.contract.findings import ConfigError, listed
from dray.train.checkpoint import manifest
from dray.train.recipe_schema import Lora

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add(network: Any, settings: Lora, *, task: str | None = None) -> None:  # noqa: ANN401  a transformers model
    """Add adapters in place and freeze the rest. `task` is peft's name of the objective."""
    from peft import LoraConfig  # noqa: PLC0415  seconds, and only here

    targets, head = settings.target_modules, network.get_output_embeddings()
    linear = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }
    chosen = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    unknown = [target for target, names in chosen.items() if not names]
    if unknown or not linear:
        raise ConfigError(
            "lora.target_modules names layers that the model lacks",
            wanted=f"ends of layer names, such as {listed(sorted({name.split('.')[-1] for name in linear}))}",
            found=", ".join(unknown) or f"{type(network).__name__}, which has no linear layers",
            fix="correct lora.target_modules, or remove it to train all linear layers but the head",
        )
    network.add_adapter(
        LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides by the rank
            lora_dropout=settings.dropout,
            target_modules=sorted(set().union(*chosen.values())) if targets else [*linear],
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in linear.values()),
            task_type=task,
        )
    )
    for weight in network.parameters():
        if weight.requires_grad:  # small changes are lost in 16 bits
            weight.data = weight.data.float()


def on(network: Any) -> bool:  # noqa: ANN401  a transformers model
    """Whether it has adapters."""
    return bool(getattr(network, "_hf_peft_config_loaded", False))


def save_adapter(network: Any, weights: dict[str, torch.Tensor], folder: Path, base: str) -> None:  # noqa: ANN401
    """Write the adapters as peft loads them. A base model in a folder of this machine is not named."""
    network.peft_config["default"].base_model_name_or_path = None if base.startswith(("/", ".")) else base or None
    network.save_pretrained(folder, state_dict=weights)
    manifest.seal_model(folder)


def merged(network: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """The model's own weights by their own names, with the adapters added to them."""
    adapter = network.peft_config["default"]
    sums = {}
    for name, weight in weights.items():
        layer, base, kind = name.partition(_BASE)
        if base and kind == "weight":
            product = weights[layer + _UP].float() @ weights[layer + _DOWN].float() * (adapter.lora_alpha / adapter.r)
            product = product.T if adapter.fan_in_fan_out else product
            sums[f"{layer}.weight"] = (weight.float() + product).to(weight.dtype)
        elif ".lora_" not in name:
            sums[name.replace(_BASE, ".")] = weight
    return sums


def plain(network: Any) -> Any:  # noqa: ANN401
    """The same model without adapters, on the meta device, to save merged weights."""
    with torch.device("meta"):
        copy = type(network)(network.config)
    copy.generation_config = getattr(network, "generation_config", None) or copy.generation_config
    return copy
