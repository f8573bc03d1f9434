"""Matrix products of 8 bits, by torchao: each linear layer but the head scales its inputs and weights in each step."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from dray.contract.findings import ConfigError

_RECIPES = {"fp8": "rowwise", "fp8_tensorwise": "tensorwise"}
"""torchao's names by the values of train.precision."""
_CAPABILITIES = {"fp8": (9, 0), "fp8_tensorwise": (8, 9)}
_MULTIPLE = 16  # the kernels take no other sizes


def convert(network: Any, precision: str, device: torch.device) -> None:  # noqa: ANN401  a transformers model
    """Replace the linear layers where train.precision is fp8; a CPU emulates them, for tests.

    `dray model eval`, which freezes the model, multiplies in 16 bits, on any machine.
    """
    if precision not in _RECIPES or not any(weight.requires_grad for weight in network.parameters()):
        return
    on_cpu, needed, head = device.type == "cpu", _CAPABILITIES[precision], network.get_output_embeddings()
    capability = needed if on_cpu else torch.cuda.get_device_capability(device)

    def converts(module: Any, _: str = "") -> bool:  # noqa: ANN401  a module
        sizes = (module.in_features, module.out_features) if type(module) is torch.nn.Linear else (1,)
        return module is not head and all(size % _MULTIPLE == 0 for size in sizes)

    problem = ""
    if capability < needed:
        problem = f"{torch.cuda.get_device_name(device)}, of compute capability {capability[0]}.{capability[1]}"
    elif find_spec("torchao") is None:
        problem = "torchao is not installed: dray image layer IMAGE --pip torchao"
    elif not any(map(converts, network.modules())):
        problem = f"{network.config.model_type}, which has no such layers (those of GPT-2 are Conv1D)"
    if problem:
        raise ConfigError(
            f"train.precision = {precision} is not possible here",
            wanted=f"compute capability {needed[0]}.{needed[1]}, torchao, and linear layers of sizes divisible by 16",
            found=problem,
            fix="train.precision=bf16",
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  not every image has it

    settings = replace(Float8LinearConfig.from_recipe_name(_RECIPES[precision]), emulate=on_cpu)
    convert_to_float8_training(network, module_filter_fn=converts, config=settings)
