"""A recipe's [analog]: training for analog in-memory hardware, as aihwkit-lightning simulates it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dray.config.model import Spec

Share = Annotated[float, Field(ge=0, le=1)]
Natural = Annotated[int, Field(ge=0)]


class Analog(Spec):
    """Linear layers become analog ones: quantised inputs, noisy and clipped weights."""

    enabled: bool = True
    """Whether it is done at all: off, the same recipe is its own digital comparison."""
    exclude: tuple[str, ...] = ()
    """Layers that stay digital, by their names in the model; one that is tied to the embeddings always does."""
    clip_type: Literal["none", "gaussian", "gaussian_channel"] = "none"
    """After each step weights are cut off at so many standard deviations: of the layer's, or of each output's."""
    clip_sigma: Annotated[float, Field(gt=0)] = 2.5
    """How many."""
    forward_inp_res: Natural = 0
    """Steps of the inputs' converter, 2^bits - 2: 254 is 8 bits. 0 does not quantise. It wants input_range_enable."""
    forward_out_noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise at the outputs."""
    forward_out_noise_per_channel: bool = False
    """Whether that is relative to each output's own weights."""
    forward_out_res: Natural = 0
    """Steps of the outputs' converter; 0 does not quantise. It wants forward_out_bound and input_range_enable."""
    forward_out_bound: Annotated[float, Field(ge=0)] = 0.0
    """Where the outputs' converter cuts off."""
    mapping_max_input_size: int = -1
    """Inputs of one tile; wider layers are parted. 0 or less: one tile each."""
    modifier_type: Literal["none", "add_gauss", "add_gauss_channel"] = "none"
    """Noise on the weights in training: relative to the layer's largest weight, or to each output's."""
    modifier_std_dev: Annotated[float, Field(ge=0)] = 0.0
    """Its standard deviation."""
    modifier_quantize: Literal["none", "tensor", "channel"] = "none"
    """Whether weights are quantised in training, by layer or by output."""
    modifier_res: Natural = 0
    """Steps of that."""
    input_range_enable: bool = False
    """Whether each layer has a fixed range of inputs, beyond which they are cut off."""
    input_range_learn_input_range: bool = True
    """Whether it is learned."""
    input_range_init_value: Annotated[float, Field(gt=0)] = 3.0
    """Where it begins."""
    input_range_init_from_data: Natural = 100
    """For so many batches it follows the data in place of being learned."""
    input_range_init_std_alpha: Annotated[float, Field(gt=0)] = 3.0
    """There: how many standard deviations of the inputs."""
    input_range_decay: Annotated[float, Field(ge=0)] = 0.001
    """How much it is drawn to zero while hardly any input is cut off."""
    input_range_input_min_percentage: Share = 0.95
    """The share of inputs within it above which it is drawn to zero."""
    input_range_fast_mode: bool = False
    """Whether the range follows a running minimum and maximum, which is faster."""

    @model_validator(mode="after")
    def _goes_together(self) -> Analog:
        wants = {
            "forward_inp_res": (self.forward_inp_res and not self.input_range_enable, "input_range_enable = true"),
            "forward_out_res": (
                self.forward_out_res and not (self.input_range_enable and self.forward_out_bound),
                "input_range_enable = true and forward_out_bound above 0",
            ),
            "modifier_type": (self.modifier_type != "none" and not self.modifier_std_dev, "modifier_std_dev above 0"),
            "modifier_std_dev": (self.modifier_std_dev and self.modifier_type == "none", "a modifier_type"),
            "modifier_quantize": (self.modifier_quantize != "none" and not self.modifier_res, "modifier_res above 0"),
            "modifier_res": (self.modifier_res and self.modifier_quantize == "none", "modifier_quantize"),
        }
        for name, (missing, what) in wants.items():
            if missing:
                raise ValueError(f"{name} = {getattr(self, name)} wants {what}")
        return self
