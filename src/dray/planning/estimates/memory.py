"""Estimates the memory of a run before it starts, from the model's configuration and the recipe.

Parameters and activations come from a formula. The logits, large in small models, come on top.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import STRATEGIES, Train
from dray.facts import Facts, Files
from dray.planning.estimates import activations, model_shape
from dray.planning.estimates.model_shape import Shape
from dray.planning.schema import World
from dray.planning.world import divide

GB = 1e9
_REST = 1.5 * GB  # CUDA's own, the libraries' kernels, communication buffers
_OFFLOADED: dict[str, tuple[str, ...]] = {
    "": (),
    "optimizer": ("optimizer", "gradients"),
    "all": ("weights", "optimizer", "gradients"),
}
_CHANGES: tuple[dict[str, Any], ...] = (
    {"batch.per_device": 1, "batch.gradient_accumulation_steps": None},
    {"train.activation_checkpointing": True},
    {"train.strategy": "zero2", "train.offload": ""},
    {"train.strategy": "zero3", "train.offload": ""},
    {"train.strategy": "zero3", "train.offload": "optimizer"},
    {"train.strategy": "zero3", "train.offload": "all"},
)


class Estimate(NamedTuple):
    """Bytes on each GPU and on each node's host; in a run without GPUs all are on the host."""

    gpu: dict[str, float]
    host: dict[str, float]

    @property
    def on_gpu(self) -> float:
        return sum(self.gpu.values())

    def lines(self) -> Iterator[str]:
        """The estimate as lines of text."""
        for name, parts in (("on each GPU", self.gpu), ("on each node's host", self.host)):
            shown = [f"{part} {size / GB:.2f}" for part, size in parts.items() if size]
            if shown:
                yield f"{sum(parts.values()) / GB:.1f} GB {name}: {', '.join(shown)}"


def estimate(recipe: Recipe, model: Shape, *, ranks: int, ranks_per_node: int) -> Estimate:
    """The memory that the recipe needs on so many ranks."""
    train = recipe.train
    assert train is not None
    assert recipe.batch is not None
    shares = divide(recipe.batch, world_size=ranks)
    lora = recipe.lora if recipe.has_lora else None
    trained = lora.rank * model.linear * model.layers if lora else model.parameters
    half = 2 if train.precision != "fp32" else 4
    kept = 2 if recipe.model.dtype == "bf16" else 4
    stage, zero = STRATEGIES[train.strategy][:2]
    # What fsdp chooses by itself it chooses by the memory that is free: so the least counts.
    group = train.fsdp_shard if train.strategy == "fsdp" else "auto"
    shards = ranks if group in ("auto", "all") else ranks_per_node * (1 if group == "node" else int(group))
    second, copies = "gathered layers", 0.0
    if stage == 3:
        # All that is in no layer, from the first layer to the last; beside it one layer, and the next on its way.
        layers = 2 if train.strategy != "fsdp" or train.reshard_after_forward else model.layers
        copies = half * (model.outside + layers * (model.parameters - model.outside) / model.layers)
    elif half < kept and not zero:
        second, copies = "their 16-bit copies", half * model.parameters
    each = 4 if zero or lora else kept  # LoRA's are in 32 bits, and so is what DeepSpeed sums
    gradients = each * trained / (shards if stage >= 2 else 1)
    kept_for_backward = _activations(recipe, train, model, shares.per_device or 1)
    if ranks == 1 and not zero and shares.gradient_accumulation_steps == 1:
        # Made while activations go; at the beginning of the backward pass the head's alone is there.
        gradients = max(gradients - kept_for_backward, min(gradients, each * model.vocabulary * model.hidden))
    parts = {
        "weights": (half if zero else kept) * model.parameters / (shards if stage == 3 else 1),
        second: copies,
        "gradients": gradients,
        "optimizer": (12 if zero else 2 * each + 4 * bool(train.ema_decay)) * trained / (shards if stage >= 1 else 1),
        "activations": kept_for_backward,
        "the rest": _REST if recipe.image != "cpu" else 0.0,
    }
    away = tuple(parts) if recipe.image == "cpu" else _OFFLOADED[train.offload]
    host = {part: size * ranks_per_node for part, size in parts.items() if part in away}
    return Estimate({part: size for part, size in parts.items() if part not in away}, host)


def use(recipe: Recipe, kind: str) -> activations.Use:
    """How the recipe runs a model of this type."""
    train, attention = recipe.train, recipe.model.attn_implementation
    assert train is not None
    stage, deepspeed = STRATEGIES[train.strategy][:2]
    half = train.precision != "fp32"
    # FSDP and DeepSpeed compute with 16-bit weights, and so with 16 bits between the layers.
    narrow = half and (deepspeed or stage == 3)
    residual = 2 if narrow or recipe.model.dtype == "bf16" else 4
    return activations.Use(
        recipe.data.sequence_length,
        products=2 if half else residual,
        residual=residual,
        autocast=half and not narrow,
        compiled=train.compile is True,
        checkpointed=train.activation_checkpointing,
        eager=attention == "eager",
        # flex attention needs no mask tensor
        masked=recipe.data.document_mask and attention in ("sdpa", "auto" if kind in model_shape.WITHOUT_FLEX else ""),
    )


def _activations(recipe: Recipe, train: Train, model: Shape, rows: int) -> float:
    """Bytes of one micro-batch's activations, at the beginning of its backward pass."""
    how = use(recipe, model.kind)
    row = activations.kept(model, how)
    predicted = train.mlm_probability if train.objective == "masked" else 1.0  # of tokens; the head computes no other
    size = padded(recipe, model)
    wide = how.products if train.loss in ("auto", "full") else how.residual
    copy = size * model.hidden * wide if size > model.vocabulary else 0
    return rows * row + activations.head(train.loss, rows * predicted * how.length, size, model.hidden, how) + copy


def padded(recipe: Recipe, model: Shape) -> int:
    """The number of words with which the head computes, padding included."""
    multiple = recipe.model.pad_to_multiple_of
    return model.vocabulary if multiple == "auto" else model.vocabulary + -model.vocabulary % max(multiple, 1)


def reason(recipe: Recipe, world: World, site: Site, facts: Facts, files: Files) -> str:
    """The estimate as text; the recipe's batch is divided among the ranks."""
    memory, model = limit(site, facts), model_shape.known(files)
    if model is None:
        name = recipe.model.name or recipe.model.tokenizer or "the model"
        missing = f"{name} is not downloaded; dray data prefetch RECIPE downloads it"
        if files.configuration:
            missing = f"the size of model type {recipe.model.name or recipe.model.type} is not known"
        elif name.startswith(("/", ".")):
            missing = f"{name} has no config.json that can be read here"
        unchecked = " (so --gpu-memory is not checked)" if facts.gpu_memory_gb else ""
        return f"not estimated: {missing}{unchecked}"
    needed = estimate(recipe, model, ranks=world.size, ranks_per_node=world.ranks_per_node)
    text = f"an estimate for {model.parameters:,} parameters"
    if memory and needed.gpu:
        text += f", on GPUs of {memory:g} GB"
    return "\n".join([text, *needed.lines()])


def limit(site: Site, facts: Facts) -> float | None:
    """GB of memory on each GPU; None if unknown."""
    return site.gpu_memory_gb if facts.gpu_memory_gb is None else facts.gpu_memory_gb


def fitting(recipe: Recipe, model: Shape, world: World, most: float) -> str:
    """The smallest change with which the model takes `most` bytes: one of the list, or its first few together."""
    for change in (*_CHANGES, *accumulate(_CHANGES, operator.or_)):
        changed = recipe
        for key, value in change.items():
            section, _, name = key.partition(".")
            changed = changed.with_values(section, **{name: value})
        needed = estimate(changed, model, ranks=world.size, ranks_per_node=world.ranks_per_node)
        if needed.on_gpu <= most:
            settings = [f"{key}={str(value).lower()}" for key, value in change.items() if value]
            if recipe.train and recipe.train.deepspeed and "train.strategy" in change:
                settings.insert(0, "train.deepspeed=")
            return f"set {' '.join(settings)}, which takes {next(needed.lines())}"
    return ""
