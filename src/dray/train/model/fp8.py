"""Matrix products of 8 bits, by torchao: each linear layer but the head scales its inputs and weights in each step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dray.contract.findings import ConfigError

RECIPES = {"fp8": "rowwise", "fp8_tensorwise": "tensorwise"}
"""torchao's names by the values of train.precision."""
_CAPABILITY = {"fp8": (9, 0), "fp8_tensorwise": (8, 9)}
_MULTIPLE = 16  # the kernels take no other sizes


def convert(network: Any, precision: str, device: torch.device) -> None:  # noqa: ANN401  a transformers model
    """Replace the linear layers where train.precision is fp8; a CPU emulates them, for tests."""
    if precision not in RECIPES:
        return
    on_cpu, needed = device.type == "cpu", _CAPABILITY[precision]
    capability = needed if on_cpu else torch.cuda.get_device_capability(device)
    if capability < needed:
        raise ConfigError(
            f"this GPU has no products for train.precision = {precision}",
            wanted="compute capability {}.{} or more".format(*needed),
            found=f"{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}",
            fix="train.precision=bf16",
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  not every image has it
    except ImportError as error:
        raise ConfigError(
            f"train.precision = {precision} needs torchao",
            wanted="a torchao for this torch",
            found=f"torch {torch.__version__}; {error}",
            fix="dray image layer IMAGE --pip torchao, or train.precision=bf16",
        ) from error
    head = network.get_output_embeddings()

    def converts(module: Any, _: str) -> bool:  # noqa: ANN401  a module
        sizes = (module.in_features, module.out_features) if type(module) is torch.nn.Linear else (1,)
        return module is not head and all(size % _MULTIPLE == 0 for size in sizes)

    if not any(converts(module, "") for module in network.modules()):
        raise ConfigError(
            f"this model has no layers for train.precision = {precision}",
            wanted=f"torch.nn.Linear layers beside the head, whose sizes are divisible by {_MULTIPLE}",
            found=f"{network.config.model_type} (GPT-2 has Conv1D layers)",
            fix="train.precision=bf16",
        )
    settings = replace(Float8LinearConfig.from_recipe_name(RECIPES[precision]), emulate=on_cpu)
    convert_to_float8_training(network, module_filter_fn=converts, config=settings)
