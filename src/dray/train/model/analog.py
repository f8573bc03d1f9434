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
    WeightQuantizationType,
)
from safetensors import safe_open

from dray.contract.findings import ConfigError, listed
from dray.train import ranks
from dray.train.parallel.base import Strategy
from dray.train.recipe import Analog as Settings

_CLIPS = {"gaussian": WeightClipType.LAYER_GAUSSIAN, "gaussian_channel": WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL}
_NOISES = {
    "add_gauss": WeightNoiseInjectionType.ADD_NORMAL,
    "add_gauss_channel": WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL,
}
_COUNTS = "input_range_update_idx"  # how often each input range has followed the data
_STEPS = {"tensor": WeightQuantizationType.DISCRETIZE, "channel": WeightQuantizationType.DISCRETIZE_PER_CHANNEL}


def convert(network: Any, settings: Settings, folder: str) -> None:  # noqa: ANN401  a transformers model
    """Make linear layers analog, in place; `folder` is a saved model whose input ranges are loaded."""
    linear = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)]
    unknown = [name for name in settings.exclude if name not in linear]
    if unknown:
        raise ConfigError(
            "analog.exclude names layers that are not linear layers of the model",
            wanted=f"some of {listed(linear) or 'none: it has no linear layer'}",
            found=", ".join(unknown),
            fix="correct analog.exclude",
        )
    tied = network.get_input_embeddings().weight
    kept = [name for name in linear if network.get_submodule(name).weight is tied]
    convert_to_analog(
        network, _config(settings), exclude_modules=[*settings.exclude, *kept], inplace=True, ensure_analog_root=False
    )
    if not layers(network):
        raise ConfigError(
            "this model has no layer that can become analog",
            wanted="a torch.nn.Linear layer that is neither excluded nor tied to the embeddings",
            found=f"{type(network).__name__} with {len(linear)}{': ' if linear else ''}{listed(linear)}",
            fix="another model.type, such as bert or llama (GPT-2 has Conv1D layers), or analog.enabled = false",
        )
    _take_up(network, folder)


def layers(network: Any) -> list[tuple[str, Any]]:  # noqa: ANN401  a transformers model
    """The analog ones by name."""
    return [(name, module) for name, module in network.named_modules() if isinstance(module, AnalogLinear)]


def _config(settings: Settings) -> TorchInferenceRPUConfig:
    ranges = {
        name.removeprefix("input_range_"): value
        for name, value in vars(settings).items()
        if name.startswith("input_range_")
    }
    return TorchInferenceRPUConfig(
        forward=IOParameters(
            inp_res=settings.forward_inp_res or -1,
            out_noise=settings.forward_out_noise,
            out_noise_per_channel=settings.forward_out_noise_per_channel,
            out_bound=settings.forward_out_bound,
            out_res=settings.forward_out_res or -1,
        ),
        clip=WeightClipParameter(sigma=settings.clip_sigma, type=_CLIPS.get(settings.clip_type, WeightClipType.NONE)),
        modifier=WeightModifierParameter(
            std_dev=settings.modifier_std_dev,
            res=settings.modifier_res,
            noise_type=_NOISES.get(settings.modifier_type, WeightNoiseInjectionType.NONE),
            quantization_type=_STEPS.get(settings.modifier_quantize, WeightQuantizationType.NONE),
        ),
        mapping=MappingParameter(max_input_size=settings.mapping_max_input_size),
        pre_post=PrePostProcessingParameter(input_range=InputRangeParameter(**ranges)),
    )


def _take_up(network: Any, folder: str) -> None:  # noqa: ANN401  a transformers model
    """A digital `from_pretrained` leaves the input ranges in the file."""
    buffers = {
        f"{name}.{part}": getattr(layer, part)
        for name, layer in layers(network)
        for part in ("input_range", "input_range_update_idx")
        if getattr(layer, part, None) is not None
    }
    for path in sorted(Path(folder).glob("*.safetensors")) if folder else ():
        with safe_open(path, "pt") as file:
            for name in buffers.keys() & set(file.keys()):
                found = file.get_tensor(name)
                if found.shape == buffers[name].shape:
                    buffers[name].data.copy_(found)


class Analog:
    """What is done to the weights around each step of the optimizer."""

    def __init__(self, strategy: Strategy, settings: Settings) -> None:
        self.strategy, self.layers = strategy, [layer for _, layer in layers(strategy.network)]
        self.sigma = settings.clip_sigma if settings.clip_type != "none" else 0.0
        self.dims = 1 if settings.clip_type == "gaussian_channel" else None
        self.follows = settings.input_range_init_from_data if settings.input_range_enable else 0
        self._following: list[Any] = []
        self._seen: dict[Any, torch.Tensor] = {}
        for layer in self.layers:
            if layer.input_range_update_idx is not None:
                # The library compares it in each pass, and would so wait for the device. A list hides the buffer.
                layer.__dict__[_COUNTS] = layer.input_range_update_idx.int().tolist()
        for layer in self.layers if self.follows else ():
            layer.register_forward_hook(self._note, prepend=True)  # before ZeRO-3 takes the weights away again

    def _note(self, layer: Any, *_: object) -> None:  # noqa: ANN401  an analog layer
        """A range that has followed the data stays so for the next micro-batch of the same step, too."""
        if layer.training and layer in self._following:
            self._seen[layer] = layer.input_range.detach().float().clone()
            self.strategy.write(layer.input_range, self._seen[layer])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: undo what the optimizer does to an input range that follows the data."""
        self._following = [layer for layer in self.layers if self._follows(layer)]
        yield
        ranges = self._mean([self._seen[layer] for layer in self._following])
        for layer, value in zip(self._following, ranges, strict=True):
            self.strategy.write(layer.input_range, value)
            for place, count in enumerate(layer.input_range_update_idx):
                layer._buffers[_COUNTS][place] = count  # which checkpoints and the saved model have
        for layer in self.layers if self.sigma else ():
            weight = self.strategy.read(layer.weight)
            bound = self.sigma * weight.std(self.dims, keepdim=True)
            self.strategy.write(layer.weight, weight.clamp(-bound, bound))

    def _follows(self, layer: Any) -> bool:  # noqa: ANN401  an analog layer
        return bool(self.follows) and min(layer.input_range_update_idx) < self.follows

    def _mean(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each rank has seen other data."""
        if not values:
            return values
        whole = torch.cat(values)
        dist.all_reduce(whole)
        return list(torch.split(whole / ranks.world(), [len(value) for value in values]))
