"""How a model is distributed over ranks. Each strategy is a file with a class STRATEGY; zero1 to zero3 share one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from dray.train.config import Config
from dray.train.model import fp8, layers
from dray.train.objectives.base import LossModule
from dray.train.parallel.base import Strategy
from dray.train.parallel.ddp import HALF


def make(network: torch.nn.Module, config: Config, device: torch.device) -> Strategy:
    """Make the strategy of train.strategy; it sends rank 0's weights to all ranks."""
    padded = config.model.pad_to_multiple_of
    multiple = padded if isinstance(padded, int) else 1
    half, compiled = HALF.get(config.train.precision), config.train.compile is True
    module = LossModule(network, config.train.loss, half, multiple, compiled=compiled)
    fp8.convert(network, config.train.precision, device)
    if compiled:
        layers.compile_each(network)
    file: Any = import_module(
        f"{__name__}.{config.train.strategy.rstrip('123')}"
    )  # one alone: importing DeepSpeed takes a second
    strategy: Strategy = file.STRATEGY(module, config, device)
    return strategy
