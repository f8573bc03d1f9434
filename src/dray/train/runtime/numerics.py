"""torch's settings of precision and determinism, made before the model is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dray.train.config import Config


def set_up(config: Config, device: torch.device) -> None:
    """A CPU has no TF32, and oneDNN would take the same word for bf16 products.

    In bf16 and fp16 a product that stays fp32 has to be exact: transformers computes rotary positions so.

    By the names from before torch 2.9: its new ones, fp32_precision, leave the old ones unreadable, and Inductor reads
    both (seen with 2.9.1 and 2.13).
    """
    if device.type != "cpu":
        tf32 = config.train.tf32 and config.train.precision == "fp32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
    if config.train.deterministic:  # planning/environment.py has set the variables that this needs
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def keep_rotary_exact(network: torch.nn.Module) -> None:
    """Compute rotary positions without TF32, where the other products have it.

    transformers multiplied frequencies by positions as matrices (5.17 does, 5.23 does not). TF32 has 11 bits: it rounds
    positions past 2,048 (transformers #48428).
    """
    if torch.get_float32_matmul_precision() == "highest":
        return
    for module in network.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            module.forward = _elementwise(module.forward)


class _Elementwise(TorchFunctionMode):
    """Products of a column by a row, elementwise: the same numbers, in eager mode and in a compiled graph."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and args[0].shape[-1] == 1:
            return args[0] * args[1]
        return function(*args, **(kwargs or {}))


def _elementwise(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def exact(*args: Any, **options: Any) -> Any:  # noqa: ANN401  the module's own
        with _Elementwise():
            return forward(*args, **options)

    return exact
