"""Layers of analog in-memory hardware, simulated by aihwkit-lightning.

Two things happen to weights beside the optimizer: they are clipped after a step, and input ranges follow the data at
first. Both are written where the weights really are: a sharded optimizer has 32-bit weights of its own and overwrites
the model's with them in each step, which would undo clipping the model's alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aihwkit_lightning.nn import AnalogLinear
from aihwkit_lightning.nn.conversion import convert_to_analog
from aihwkit_lightning.simulator.configs import TorchInferenceRPUConfig
from aihwkit_lightning.simulator.parameters import (
    InputRangeParameter,
    IOParameters,
    MappingParameter,
    PrePostProcessingParameter,
    WeightClipParameter,
    WeightClipType,
    WeightModifierParameter,
    WeightNoiseInjectionType,
)
from safetensors import safe_open

from dray.contract.findings import ConfigError, listed
from dray.train import ranks
from dray.train.parallel.base import Strategy
from dray.train.recipe_schema import Analog as Settings

_CLIPS = {
    "none": WeightClipType.NONE,
    "gaussian": WeightClipType.LAYER_GAUSSIAN,
    "gaussian_channel": WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL,
}
_NOISES = {
    "none": WeightNoiseInjectionType.NONE,
    "add_gauss": WeightNoiseInjectionType.ADD_NORMAL,
    "add_gauss_channel": WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL,
}
_COUNTS = "input_range_update_idx"  # how often each input range has followed the data


def convert(network: Any, settings: Settings, folder: str) -> None:  # noqa: ANN401  a transformers model
    """Make linear layers analog, in place; `folder` is a saved model whose input ranges are loaded."""
    linear = {name: module for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)}
    tied = network.get_input_embeddings().weight
    kept = [name for name, module in linear.items() if module.weight is tied]
    unknown = set(settings.exclude) - linear.keys()
    if unknown or linear.keys() <= {*settings.exclude, *kept}:
        raise ConfigError(
            "this model has no such layers to make analog, or to exclude",
            wanted="torch.nn.Linear layers that are not tied to the embeddings (GPT-2 has Conv1D layers)",
            found=listed(sorted(unknown)) or f"{type(network).__name__} with {listed(linear) or 'no linear layer'}",
            fix="correct analog.exclude, set another model.type, such as bert or llama, or analog.enabled = false",
        )
    values = vars(settings)
    forward, ranges = (
        {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        for prefix in ("forward_", "input_range_")
    )
    forward |= {"inp_res": settings.forward_inp_res or -1, "out_res": settings.forward_out_res or -1}
    hardware = TorchInferenceRPUConfig(
        forward=IOParameters(**forward),
        clip=WeightClipParameter(sigma=settings.clip_sigma, type=_CLIPS[settings.clip_type]),
        modifier=WeightModifierParameter(std_dev=settings.modifier_std_dev, noise_type=_NOISES[settings.modifier_type]),
        mapping=MappingParameter(max_input_size=settings.mapping_max_input_size),
        pre_post=PrePostProcessingParameter(input_range=InputRangeParameter(**ranges)),
    )
    convert_to_analog(
        network, hardware, exclude_modules=[*settings.exclude, *kept], inplace=True, ensure_analog_root=False
    )
    # A digital `from_pretrained` leaves the input ranges in the file.
    state = network.state_dict(keep_vars=True)
    saved = {name for name in state if name.endswith((".input_range", f".{_COUNTS}"))}
    for path in Path(folder).glob("*.safetensors") if folder else ():
        with safe_open(path, "pt") as file:
            for name in saved & set(file.keys()):
                state[name].data.copy_(file.get_tensor(name))


class Analog:
    """What is done to the weights around each step of the optimizer."""

    def __init__(self, strategy: Strategy, settings: Settings) -> None:
        self.strategy = strategy
        self.layers: list[Any] = [module for module in strategy.network.modules() if isinstance(module, AnalogLinear)]
        self.sigma = settings.clip_sigma if settings.clip_type != "none" else 0.0
        self.dims = 1 if settings.clip_type == "gaussian_channel" else None
        self.follows = settings.input_range_init_from_data if settings.input_range_enable else 0
        self._following: dict[Any, torch.Tensor] = {}
        """Layers whose input range follows the data in this step, and the range that each has come to."""
        if not settings.input_range_enable:
            return
        for layer in self.layers:
            # The library compares it in each pass, and would so wait for the device. A list hides the buffer.
            layer.__dict__[_COUNTS] = layer.input_range_update_idx.int().tolist()
            layer.register_forward_hook(self._note, prepend=True)  # before ZeRO-3 takes the weights away again

    def _note(self, layer: Any, *_: object) -> None:  # noqa: ANN401  an analog layer
        """Keep the range that this micro-batch has set for the next one of the step."""
        if layer.training and layer in self._following:
            self._following[layer] = layer.input_range.detach().float().clone()
            self.strategy.write(layer.input_range, self._following[layer])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: undo what the optimizer does to an input range that follows the data."""
        following = [layer for layer in self.layers if self.follows and min(layer.__dict__[_COUNTS]) < self.follows]
        self._following = {layer: layer.input_range for layer in following}
        yield
        if following:  # each rank has seen other data
            ranges = torch.cat([*self._following.values()])
            dist.all_reduce(ranges)
            means = torch.split(ranges / ranks.world(), [*map(len, self._following.values())])
            for layer, mean in zip(following, means, strict=True):
                self.strategy.write(layer.input_range, mean)
                for place, count in enumerate(layer.__dict__[_COUNTS]):
                    layer._buffers[_COUNTS][place] = count  # which checkpoints and the saved model have
        for layer in self.layers if self.sigma else ():
            weight = self.strategy.read(layer.weight)
            bound = self.sigma * weight.std(self.dims, keepdim=True)
            self.strategy.write(layer.weight, weight.clamp(-bound, bound))
