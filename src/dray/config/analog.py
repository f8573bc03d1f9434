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
    """Whether layers become analog. With false the same recipe trains digital layers, to compare with."""
    exclude: tuple[str, ...] = ()
    """Layers that stay digital, by their names in the model. A layer tied to the embeddings always stays digital."""
    clip_type: Literal["none", "gaussian", "gaussian_channel"] = "none"
    """Clip weights after each step at clip_sigma standard deviations, of the layer or of each output channel."""
    clip_sigma: Annotated[float, Field(gt=0)] = 2.5
    """Standard deviations at which clip_type clips weights."""
    forward_inp_res: Natural = 0
    """Steps of the inputs' converter, 2^bits - 2: 254 is 8 bits. 0 does not quantise. Needs input_range_enable."""
    forward_out_noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise at the outputs."""
    forward_out_noise_per_channel: bool = False
    """Whether forward_out_noise is relative to the weights of each output channel."""
    forward_out_res: Natural = 0
    """Steps of the outputs' converter; 0 does not quantise. Needs forward_out_bound and input_range_enable."""
    forward_out_bound: Annotated[float, Field(ge=0)] = 0.0
    """The bound at which the outputs' converter clips."""
    mapping_max_input_size: int = -1
    """Inputs of one tile; wider layers are split into several. 0 or less: one tile per layer."""
    modifier_type: Literal["none", "add_gauss", "add_gauss_channel"] = "none"
    """Noise on the weights in training, relative to the largest weight of the layer or of each output channel."""
    modifier_std_dev: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise of modifier_type."""
    modifier_quantize: Literal["none", "tensor", "channel"] = "none"
    """Whether weights are quantised in training, per layer or per output channel."""
    modifier_res: Natural = 0
    """Steps of modifier_quantize."""
    input_range_enable: bool = False
    """Whether each layer has a range of inputs, at which larger inputs are clipped."""
    input_range_learn_input_range: bool = True
    """Whether the input range is learned."""
    input_range_init_value: Annotated[float, Field(gt=0)] = 3.0
    """The input range at the start."""
    input_range_init_from_data: Natural = 100
    """Batches during which the input range follows the data, before it is learned."""
    input_range_init_std_alpha: Annotated[float, Field(gt=0)] = 3.0
    """The input range during these batches, in standard deviations of the inputs."""
    input_range_decay: Annotated[float, Field(ge=0)] = 0.001
    """Decay of the input range while hardly any input is clipped."""
    input_range_input_min_percentage: Share = 0.95
    """The input range decays while more than this share of the inputs is within it."""
    input_range_fast_mode: bool = False
    """Whether the input range follows a running minimum and maximum, which is faster."""

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
                raise ValueError(f"{name} = {getattr(self, name)} needs {what}")
        return self
