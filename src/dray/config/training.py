"""A recipe's sections for dray's own trainer beside its datasets: batch, model, loop, evaluation, LoRA, analog."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from dray.config.data import Map
from dray.config.load_toml import Count, Natural, NotNegative, Positive, Spec

Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Scalar = str | int | float | bool
Strategy = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]
Tracker = Literal["mlflow", "tensorboard", "trackio", "wandb"]
"""accelerate's names."""
_STEPS = re.compile("[1-9][0-9]{0,17}-[1-9][0-9]{0,17}")
_NO_END = 1 << 62
_LR_OPTIONS = {
    "polynomial": ("power",),
    "cosine_with_restarts": ("num_cycles",),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "decay_type"),
}


class Sharding(NamedTuple):
    """What a strategy shards over the ranks, and what follows from it."""

    stage: int
    """The ZeRO stage, as DeepSpeed counts: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    deepspeed: bool = False
    analog: bool = True
    mixed_dtypes: bool = True
    """Whether one layer may have weights of several types, such as LoRA's beside 16-bit weights."""


STRATEGIES: dict[Strategy, Sharding] = {
    "ddp": Sharding(0),
    "fsdp": Sharding(3, analog=False, mixed_dtypes=False),
    "zero1": Sharding(1, deepspeed=True),
    "zero2": Sharding(2, deepspeed=True),
    "zero3": Sharding(3, deepspeed=True),
}
"""The values of train.strategy; train/parallel has their classes."""


class Batch(Spec):
    """The samples of one optimizer step. dray keeps global_size; the rest follows from the world size."""

    global_size: Count
    """Samples in one optimizer step over all ranks."""
    per_device: Count | None = None
    """Samples of one micro-batch on each rank. Left out: global_size divided by world size and accumulation."""
    gradient_accumulation_steps: Count | None = None
    """Micro-batches before one optimizer step. Left out: as many as global_size needs."""


class Model(Spec):
    """The model: an existing one by name, or a new one of a type that transformers knows."""

    name: str = ""
    """A model of the hub, or a folder of `save_pretrained`; its path begins with `/` or `.` (the recipe's folder)."""
    revision: str = "main"
    """The hub's commit, tag or branch."""
    weights: bool = True
    """Whether to load the named model's weights, or only its configuration."""
    trust_remote_code: bool = False
    """Whether Python code of the named model may run."""
    type: str = "gpt2"
    """Without name: a model type that transformers knows."""
    config: dict[str, Scalar | list[Any] | dict[str, Any]] = {}
    """Settings of the configuration, by transformers' own names. Vocabulary size comes from the tokenizer."""
    tokenizer: str = ""
    """A tokenizer, written as `name`. Left out: the named model's own, or one token per byte."""
    tokenizer_revision: str = "main"
    """The tokenizer's commit, tag or branch on the hub, if it is not the named model's own."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """Attention function of transformers; auto is sdpa, or eager if the model has no other; with
    document_mask on GPUs flex_attention."""
    pad_to_multiple_of: Literal["auto"] | Annotated[int, Field(ge=0, le=1024)] = "auto"
    """The head computes with a vocabulary padded to a multiple of this; saved models are not padded. 0 pads nothing.
    auto: 128 on GPUs, for speed; none on a CPU, or with an analog head."""
    dtype: Literal["fp32", "bf16", "auto"] = "fp32"
    """Type of the weights that the optimizer updates; auto is the named model's own."""

    @field_validator("config")
    @classmethod
    def _finite(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Also in its lists, of which the schema says nothing."""
        try:
            json.dumps(config, allow_nan=False)
        except ValueError:
            raise ValueError("expected finite numbers: a model's config.json has neither inf nor nan") from None
        return config


class Train(Spec):
    """The training loop of dray's trainer."""

    steps: Count | None = None
    """Optimizer steps."""
    epochs: Positive | None = None
    """Epochs over the training dataset, instead of steps."""
    objective: Literal["causal", "masked", "sft"] = "causal"
    """causal: predict each token from those before it. masked: predict masked tokens from all others. sft: causal, on
    conversations in the model's chat template, with labels on the assistant's messages alone."""
    loss: Literal["auto", "full", "chunked"] = "auto"
    """How logits and loss are made. full: whole logits. chunked: some tokens at a time, and never the logits of all.
    Both skip tokens without a label. auto: chunked on GPUs where whole logits do not fit: in a compiled run into 90% of
    the memory, if that is known, else into 1 GB."""
    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """With objective = masked: probability that a token is masked."""
    lr: Positive
    """Peak learning rate."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises; it reaches its peak with the last of them."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "polynomial",
        "cosine_with_restarts",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "cosine"
    """How the learning rate changes after the warm-up: a schedule of transformers."""
    lr_scheduler_kwargs: dict[str, Positive | Literal["linear", "cosine", "1-sqrt"]] = {}
    """Options of the schedule, by transformers' names. polynomial: power. cosine_with_restarts: num_cycles.
    inverse_sqrt: timescale. warmup_stable_decay: num_decay_steps (left out: a tenth of the steps) and decay_type."""
    sequence_length_warmup: tuple[tuple[Count, Count], ...] = ()
    """Pairs [until, length]: [[1000, 256], [3000, 512]] cuts samples into rows of 256 tokens until step 1,000, and of
    512 until step 3,000. The tokens of each step stay the same."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the schedule; constant does not fall, and inverse_sqrt falls towards it."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: for all weights. muon: Muon for the matrices between embeddings and head, whose updates are as large as
    AdamW's, and AdamW for all other weights; with ddp and fsdp alone."""
    ema_decay: Fraction = 0.0
    """Decay of a running average of the weights, which the last evaluation and the final model have; 0: none. With ddp
    and fsdp alone."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's running averages of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the denominator of AdamW's update, for numerical stability."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, for matrices; biases and norms have none."""
    precision: Literal["fp32", "bf16", "fp16", "fp8", "fp8_tensorwise"] = "bf16"
    """Type of the matrix products; weights stay in 32 bits (model.dtype). fp8: linear layers but the head by torchao,
    with a scale for each row or each tensor, and bf16 for the rest. Left out, CPUs take fp32, since many emulate bf16,
    and GPUs that emulate it fp16."""
    tf32: bool = True
    """Whether matrix products of 32 bits have TF32's 10 bits of mantissa, which GPUs from A100 on multiply several
    times as fast. Without effect on a CPU."""
    initial_loss_scale: Annotated[float, Field(ge=1)] = 4096.0
    """Loss scale of the first step with fp16; it then adapts."""
    seed: Natural = 42
    """Seeds weights, data order and dropout."""
    deterministic: bool = False
    """Whether two runs on the same kind of GPUs agree to the last bit, which is slower. On a CPU they always
    do."""
    log_every: Count = 10
    """Log metrics every so many steps."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this norm; 0 does not clip."""
    strategy: Strategy = "ddp"
    """ddp: each rank has the whole model. fsdp: each has a shard of weights, gradients and optimizer. zero1 to zero3:
    DeepSpeed's stages, which shard the optimizer, then gradients, then weights."""
    fsdp_shard: Literal["auto", "node", "all"] | Count = "auto"
    """Over which ranks fsdp shards: those of a node, or of so many nodes that follow one another, with copies on the
    others (HSDP), so that weights are gathered within these alone; or all. auto, here and in the next: the fastest
    with which weights, gradients and optimizer take at most a quarter of the memory."""
    reshard_after_forward: Literal["auto"] | bool = "auto"
    """Whether fsdp frees a layer's weights after its forward pass and gathers them again for its backward pass, or
    keeps them until the end of the step."""
    offload: Literal["", "optimizer", "all"] = ""
    """What zero1 to zero3 keep in the host's memory instead of the GPU's: the optimizer, or with zero3 also the weights
    (all)."""
    compile: Literal["auto"] | bool = "auto"
    """Whether torch.compile compiles each layer and the loss: a slower first step, faster steps from then on. auto: on
    GPUs, but not with zero3 or analog layers."""
    activation_checkpointing: bool = False
    """Whether activations are computed again in the backward pass instead of kept."""
    deepspeed: str | None = None
    """A DeepSpeed JSON file; it decides the strategy. The recipe fills in each `auto`; a value set in both must be
    the same. A relative path starts beside the recipe."""
    eval_every: Natural = 0
    """Steps between two evaluations; 0: only after training."""
    attention_stats: bool = False
    """Whether the smallest and the largest attention score of each layer are logged."""
    profile: str = ""
    """Steps to profile with torch.profiler on rank 0, such as 10-12, both included: a trace, and a table of the longest
    kernels for `dray report`. These steps are slower. Left out: none."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers that get the metrics too; offline, unless their own environment variables say otherwise.
    TensorBoard's files are always written."""

    def contradictions(self) -> Iterator[str]:
        if (self.steps is None) == (self.epochs is None):
            both = f"both are set: steps = {self.steps}, epochs = {self.epochs}"
            yield f"expected one of steps and epochs; {'neither is set' if self.steps is None else both}"
        if self.steps and self.warmup_steps > self.steps:
            shown = f"warmup_steps = {self.warmup_steps} is more than steps = {self.steps}"
            yield f"{shown}; set train.warmup_steps=0 too, or at most {self.steps}"
        if self.profile:
            yield from self._of_profile()
        yield from self._of_schedule()
        if self.min_lr > self.lr:
            yield f"min_lr = {self.min_lr} is more than lr = {self.lr}"
        if self.optimizer == "muon" and (STRATEGIES[self.strategy].deepspeed or self.deepspeed):
            yield "optimizer = muon needs strategy ddp or fsdp: DeepSpeed shards flattened weights, not matrices"
        if self.ema_decay and (STRATEGIES[self.strategy].deepspeed or self.deepspeed):
            yield f"ema_decay = {self.ema_decay} needs strategy ddp or fsdp: DeepSpeed's optimizer keeps no average"
        stages = {"": self.strategy, "optimizer": "zero1, zero2 or zero3", "all": "zero3"}[self.offload]
        unread = self.deepspeed is not None and not self.deepspeed.startswith("{")  # its stage is not known yet
        if self.strategy not in stages and not unread:
            yield f"offload = {self.offload} needs strategy {stages}, but it is {self.strategy}"

    def _of_schedule(self) -> Iterator[str]:
        options = _LR_OPTIONS.get(self.lr_scheduler_type, ())
        after = max(1, (self.steps or _NO_END) - self.warmup_steps)
        for name, value in self.lr_scheduler_kwargs.items():
            shown = f"lr_scheduler_kwargs.{name} = {value}"
            if name not in options:
                expected = ", ".join(options) or "no options"
                yield f'lr_scheduler_kwargs.{name}: lr_scheduler_type = "{self.lr_scheduler_type}" has {expected}'
            elif isinstance(value, str):
                if name != "decay_type":
                    yield f"{shown} is not a number; set train.lr_scheduler_kwargs.{name}=1"
            elif name == "decay_type":
                yield f"{shown}: expected cosine, linear or 1-sqrt; set train.lr_scheduler_kwargs.decay_type=cosine"
            elif name == "num_decay_steps" and value > after:
                fix = f"set train.lr_scheduler_kwargs.num_decay_steps={after}, or less"
                yield f"{shown} is more than the steps after the warm-up, {after}; {fix}"

    def _of_profile(self) -> Iterator[str]:
        """The first step is 1, as in metrics.jsonl."""
        if not _STEPS.fullmatch(self.profile):
            yield "profile: expected the first and the last step, the first being 1; set train.profile=10-12"
        first, last = map(int, self.profile.split("-"))
        if first > last:
            yield f"profile: the first step is after the last; set train.profile={last}-{first}"
        if self.steps and last > self.steps:
            shown = f"profile = {self.profile} is past steps = {self.steps}"
            yield f"{shown}; set train.profile={self.steps}-{self.steps}, or earlier steps"


class Lora(Spec):
    """Low-rank adapters (LoRA, by peft): only the adapters are trained; the model's own weights are frozen."""

    enabled: bool = True
    """false: train all weights instead."""
    rank: Count = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """The adapters' output is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout of the adapters' inputs."""
    target_modules: tuple[str, ...] = ()
    """Layers to adapt, by the end of their names, such as q_proj. Left out: all linear layers but the head."""


class Evaluation(Spec):
    """One more dataset to evaluate, in addition to data.validation."""

    dataset: str
    """The dataset, written as in data.train."""
    column: str = ""
    """The column with the documents. Left out: data.column."""
    map: Map = ""
    """A function on its rows, written as in data.map. Left out: none."""
    stride: Natural = 0
    """Tokens from one window to the next: a token is predicted from at least data.sequence_length - stride others. 0:
    windows side by side."""
    last_word: bool = False
    """Whether only the last word of each document has labels; loss and accuracy are then by words."""
    max_samples: Natural = 0
    """Evaluate at most this many samples, or documents with last_word; 0 is all."""

    def contradictions(self) -> Iterator[str]:
        if self.stride and self.last_word:
            yield "stride and last_word exclude each other; for both, add two [evaluate] tables with this dataset"


class Analog(Spec):
    """Linear layers become analog ones: quantised inputs, noisy and clipped weights."""

    enabled: bool = True
    """Whether layers become analog. With false the same recipe trains digital layers, to compare with."""
    exclude: tuple[str, ...] = ()
    """Layers that stay digital, by their names in the model. A layer tied to the embeddings always stays digital."""
    clip_type: Literal["none", "gaussian", "gaussian_channel"] = "none"
    """Clip weights after each step at clip_sigma standard deviations, of the layer or of each output channel."""
    clip_sigma: Positive = 2.5
    """Standard deviations at which clip_type clips weights."""
    forward_inp_res: Natural = 0
    """Steps of the inputs' converter, 2^bits - 2: 254 is 8 bits. 0 does not quantise. Needs input_range_enable."""
    forward_out_noise: NotNegative = 0.0
    """Standard deviation of the noise at the outputs."""
    forward_out_noise_per_channel: bool = False
    """Whether forward_out_noise is relative to the weights of each output channel."""
    forward_out_res: Natural = 0
    """Steps of the outputs' converter; 0 does not quantise. Needs forward_out_bound and input_range_enable."""
    forward_out_bound: NotNegative = 0.0
    """The bound at which the outputs' converter clips."""
    mapping_max_input_size: int = -1
    """Inputs of one tile; wider layers are split into several. 0 or less: one tile per layer."""
    modifier_type: Literal["none", "add_gauss", "add_gauss_channel"] = "none"
    """Noise on the weights in training, relative to the largest weight of the layer or of each output channel."""
    modifier_std_dev: NotNegative = 0.0
    """Standard deviation of the noise of modifier_type."""
    input_range_enable: bool = False
    """Whether each layer has a range of inputs, at which larger inputs are clipped."""
    input_range_learn_input_range: bool = True
    """Whether the input range is learned."""
    input_range_init_value: Positive = 3.0
    """The input range at the start."""
    input_range_init_from_data: Natural = 100
    """Batches during which the input range follows the data, before it is learned."""
    input_range_init_std_alpha: Positive = 3.0
    """The input range during these batches, in standard deviations of the inputs."""
    input_range_decay: NotNegative = 0.001
    """Decay of the input range while hardly any input is clipped."""
    input_range_input_min_percentage: Share = 0.95
    """The input range decays while more than this share of the inputs is within it."""
    input_range_fast_mode: bool = False
    """Whether the input range follows a running minimum and maximum, which is faster."""

    def contradictions(self) -> Iterator[str]:
        missing = {
            "forward_inp_res": (not self.input_range_enable, "input_range_enable = true"),
            "forward_out_res": (
                not (self.input_range_enable and self.forward_out_bound),
                "input_range_enable = true and forward_out_bound above 0",
            ),
            "modifier_type": (not self.modifier_std_dev, "modifier_std_dev above 0"),
            "modifier_std_dev": (self.modifier_type == "none", "a modifier_type"),
        }
        for name, (is_missing, need) in missing.items():
            value = getattr(self, name)
            if is_missing and value not in (0, "none"):
                yield f"{name} = {value} needs {need}"
