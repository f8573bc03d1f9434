"""Estimates the memory of a run before it starts, from the model's configuration and the recipe.

Parameters and activations come from a formula; or they are counted in the model itself, if torch is installed and
nothing is compiled (`dray plan --exact`, and every plan made in an image). The logits, large in small models, come on
top.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import STRATEGIES
from dray.contract.findings import Finding
from dray.facts import Facts, Files
from dray.planning import batch
from dray.planning.estimates import activations, model_shape
from dray.planning.estimates.model_shape import Shape
from dray.planning.rule import Planned, refusal
from dray.planning.world import World

_GB = 1e9
_REST = 1.5 * _GB  # CUDA's own, the libraries' kernels, communication buffers


@dataclass(frozen=True)
class Estimate:
    """Bytes on each GPU and on each node's host; in a run without GPUs all are on the host."""

    gpu: dict[str, float]
    host: dict[str, float]

    @property
    def on_gpu(self) -> float:
        return sum(self.gpu.values())

    def lines(self) -> Iterator[str]:
        """The estimate as lines of text."""
        where = [("on each GPU", self.gpu), ("on each node's host", self.host)]
        for name, parts in where:
            if any(parts.values()):
                shown = ", ".join(f"{part} {size / _GB:.2f}" for part, size in parts.items() if size)
                yield f"{sum(parts.values()) / _GB:.1f} GB {name}: {shown}"


def estimate(recipe: Recipe, model: Shape, *, ranks: int, ranks_per_node: int) -> Estimate:
    """The memory that the recipe needs on so many ranks."""
    train = recipe.train
    assert train is not None
    assert recipe.batch is not None
    lora = recipe.lora if recipe.has_lora else None
    moved = lora.rank * model.linear * model.layers if lora else model.parameters
    moved = model.counted.trained if model.counted else moved
    half = 2 if train.precision != "fp32" else 4
    kept = 2 if recipe.model.dtype == "bf16" else 4
    stage, zero = STRATEGIES[train.strategy][:2]
    # What fsdp chooses by itself it chooses by the memory that is free: so the least counts.
    group = train.fsdp_shard if train.strategy == "fsdp" else "auto"
    shards = ranks if group in ("auto", "all") else ranks_per_node * (1 if group == "node" else int(group))
    weights = (half if zero else kept) * model.parameters / (shards if stage == 3 else 1)
    layer = (model.parameters - model.outside) / model.layers
    # All that is in no layer, from the first layer to the last; beside it one layer, and the next on its way.
    again = train.strategy != "fsdp" or train.reshard_after_forward
    gathered = model.outside + 2 * layer if again else model.parameters
    whole = gathered if stage == 3 else model.parameters if half < kept and not zero else 0
    moves = 4 if zero or lora else kept  # LoRA's are in 32 bits, and so is what DeepSpeed sums
    gradients = moves * moved / (shards if stage >= 2 else 1)
    kept_for_backward = _activations(recipe, model, ranks)
    if ranks == 1 and not zero and batch.divide(recipe.batch, world_size=1).gradient_accumulation_steps == 1:
        # Made while activations go; at the beginning of the backward pass the head's alone is there.
        gradients = max(gradients - kept_for_backward, min(gradients, moves * model.vocabulary * model.hidden))
    optimizer = (12 if zero else 2 * moves) * moved / (shards if stage >= 1 else 1)
    parts = {
        "weights": weights,
        "their 16-bit copies" if half == 2 and not zero and stage < 3 else "gathered layers": half * whole,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": kept_for_backward,
        "the rest": _REST if recipe.image != "cpu" else 0.0,
    }
    away = {"": (), "optimizer": ("optimizer", "gradients"), "all": ("weights", "optimizer", "gradients")}[
        train.offload
    ]
    host = {part: size * ranks_per_node for part, size in parts.items() if part in away or recipe.image == "cpu"}
    gpu = {part: size for part, size in parts.items() if part not in host}
    return Estimate(gpu, host)


def use(recipe: Recipe, *, flex: bool) -> activations.Use:
    """How the recipe runs the model; `flex`: the model has flex attention, which needs no mask tensor."""
    train, model = recipe.train, recipe.model
    assert train is not None
    stage, deepspeed = STRATEGIES[train.strategy][:2]
    half = train.precision != "fp32"
    # FSDP and DeepSpeed compute with 16-bit weights, and so with 16 bits between the layers.
    narrow = model.dtype == "bf16" or (half and (deepspeed or stage == 3))
    return activations.Use(
        recipe.data.sequence_length,
        products=2 if half or narrow else 4,
        residual=2 if narrow else 4,
        autocast=half and not deepspeed and stage < 3,
        compiled=train.compile is True,
        checkpointed=train.activation_checkpointing,
        eager=model.attn_implementation == "eager",
        masked=recipe.data.document_mask and model.attn_implementation in (("sdpa",) if flex else ("sdpa", "auto")),
    )


def _activations(recipe: Recipe, model: Shape, ranks: int) -> float:
    """Bytes of one micro-batch's activations, at the beginning of its backward pass."""
    assert recipe.batch is not None
    rows = batch.divide(recipe.batch, world_size=ranks).per_device or 1
    how = use(recipe, flex=model.block.flex)
    if model.counted and not how.compiled:
        row = float(model.counted.checkpointed if how.checkpointed else model.counted.kept)
    else:
        row = activations.kept(model.block, model.layers, how)
    train = recipe.train
    assert train is not None
    predicted = train.mlm_probability if train.objective == "masked" else 1.0  # of tokens; the head computes no other
    tokens, size = rows * predicted * how.length, padded(recipe, model)
    wide = how.products if train.loss in ("auto", "full") else how.residual
    copy = size * model.hidden * wide if size > model.vocabulary else 0
    return rows * row + activations.head(train.loss, tokens, size, model.hidden, how) + copy


def padded(recipe: Recipe, model: Shape) -> int:
    """The number of words with which the head computes, padding included."""
    multiple = recipe.model.pad_to_multiple_of
    return model.vocabulary if multiple == "auto" else model.vocabulary + -model.vocabulary % max(multiple, 1)


_CHANGES: tuple[dict[str, Any], ...] = (
    {"batch.per_device": 1, "batch.gradient_accumulation_steps": None},
    {"train.activation_checkpointing": True},
    {"train.strategy": "zero2", "train.offload": ""},
    {"train.strategy": "zero3", "train.offload": ""},
    {"train.strategy": "zero3", "train.offload": "optimizer"},
    {"train.strategy": "zero3", "train.offload": "all"},
)


def reason(recipe: Recipe, world: World, site: Site, facts: Facts, files: Files) -> str:
    """The estimate as text; the recipe's batch is divided among the ranks."""
    if recipe.train is None:
        return ""
    memory, model = limit(site, facts), model_shape.known(files)
    if model is None:
        unchecked = " (so --gpu-memory is not checked)" if facts.gpu_memory_gb else ""
        return f"not estimated: {_unknown(recipe, files)}{unchecked}"
    counted = files.counted
    needed = estimate(recipe, model, ranks=world.size, ranks_per_node=world.ranks_per_node)
    on = f", on GPUs of {memory:g} GB" if memory and needed.gpu else ""
    trained = f", {counted.trained:,} of them trained" if counted and counted.trained < counted.parameters else ""
    how = "; parameters and activations are counted in the model itself" if counted else ""
    return "\n".join([f"an estimate for {model.parameters:,} parameters{trained}{on}{how}", *needed.lines()])


def refusals(given: Planned) -> Iterator[Finding]:
    """Refuse a run that cannot fit, before it waits in the queue."""
    recipe = given.recipe.model_copy(update={"batch": given.plan.batch})
    world, site, facts = given.plan.world, given.site, given.facts
    memory, model = limit(site, facts), model_shape.known(given.files)
    if recipe.train is None or not memory or model is None:
        return
    needed = estimate(recipe, model, ranks=world.size, ranks_per_node=world.ranks_per_node)
    if needed.on_gpu <= memory * _GB:
        return
    named = f"site {site.name}" if facts.gpu_memory_gb is None else "--gpu-memory"
    yield refusal(
        f"the model does not fit: {model.parameters:,} parameters",
        wanted=f"at most {memory:g} GB on each GPU ({named})",
        found="\n".join(needed.lines()),
        fix=_fitting(recipe, model, world, most=memory * _GB)
        or "use more nodes, a smaller model or [lora]; or, if this estimate is wrong, --gpu-memory=0",
    )


def limit(site: Site, facts: Facts) -> float | None:
    """GB of memory on each GPU; None if unknown."""
    return site.gpu_memory_gb if facts.gpu_memory_gb is None else facts.gpu_memory_gb


def _unknown(recipe: Recipe, files: Files) -> str:
    if files.configuration:
        return f"the size of model type {recipe.model.name or recipe.model.type} is not known"
    name = recipe.model.name or recipe.model.tokenizer or "the model"
    if name.startswith(("/", ".")):
        return f"{name} has no config.json on this machine"
    return f"{name} is not downloaded; dray prefetch RECIPE downloads it"


def _fitting(recipe: Recipe, model: Shape, world: World, *, most: float) -> str:
    """The smallest change with which the model fits: one of the list, or its first few together."""
    for change in (*_CHANGES, *accumulate(_CHANGES, operator.or_)):
        changed = recipe
        for key, value in change.items():
            section, _, name = key.partition(".")
            changed = changed.with_values(section, **{name: value})
        needed = estimate(changed, model, ranks=world.size, ranks_per_node=world.ranks_per_node)
        if needed.on_gpu <= most:
            file = recipe.train and recipe.train.deepspeed and "train.strategy" in change
            settings = [
                *(["train.deepspeed="] if file else []),
                *(f"{key}={str(value).lower()}" for key, value in change.items() if value),
            ]
            return f"set {' '.join(settings)}, which takes {next(needed.lines())}"
    return ""
