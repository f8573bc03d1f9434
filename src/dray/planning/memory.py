"""Estimates the memory of a run before it starts, from the model's configuration and the recipe.

Parameters and activations come from a formula; or they are counted in the model itself, if torch is installed and
nothing is compiled (`dray plan --exact`, and every plan made in an image). The logits, large in small models, come on
top.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import STRATEGIES
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.facts import Counted, Facts, Files
from dray.planning import activations, batch
from dray.planning.world import World

_GB = 1e9
_REST = 1.5 * _GB  # CUDA's own, the libraries' kernels, communication buffers
# What transformers takes where a configuration does not say.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    "gpt_neo": {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50257},
    "opt": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
            "vocab_size": 50272},
    "bert": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512,
             "intermediate_size": 3072, "vocab_size": 30522},
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
              "vocab_size": 32000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}  # fmt: skip
_LEARNED = {"gpt2": 1024, "gpt_neo": 2048, "opt": 2048, "bert": 512}  # positions that are weights


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, from its configuration."""

    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    linear: int
    """Inputs plus outputs of all linear layers of one block: LoRA's size grows with it."""
    outside: int
    """Parameters that are in no block, such as the embedding: FSDP gathers them once, as one group."""
    block: activations.Block
    counted: Counted | None = None
    """What was counted in the model itself, if it was."""


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


def shape(raw: Mapping[str, Any]) -> Shape | None:
    """The sizes from config.json; None if the type of the model is not known. ConfigError: a size is not a number."""
    of_text = raw.get("text_config")  # of a model that also sees or hears
    raw = {**raw, **of_text} if isinstance(of_text, dict) else raw
    kind = str(raw.get("model_type", ""))
    known = {**_DEFAULTS.get(kind, {}), **{key: value for key, value in raw.items() if value is not None}}

    def one(*names: str, other: int = 0) -> int:
        return next((activations.whole(known, name) for name in names if name in known), other)

    hidden, layers = one("hidden_size", "n_embd", "d_model"), one("num_hidden_layers", "n_layer", "num_layers")
    heads, vocabulary = one("num_attention_heads", "n_head", "num_heads"), one("vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    each = one("head_dim", other=hidden // heads)
    width, shared = heads * each, one("num_key_value_heads", other=heads) * each
    experts = max(1, one("num_local_experts", "num_experts", "n_routed_experts"))
    of_one = ("moe_intermediate_size",) if experts > 1 else ()
    own = ("ffn_dim",) if kind == "opt" else ()
    inner = one(*of_one, *own, "intermediate_size", "n_inner", "ffn_dim", other=4 * hidden)
    gated = "rms_norm_eps" in known
    block = 2 * hidden * (width + shared) + (3 if gated else 2) * hidden * inner * experts
    block += 2 * hidden if gated else 4 * hidden + (hidden if kind == "gpt_neo" else 4 * hidden) + inner + hidden
    # Biases of queries, keys and values; and a norm for each of a head's queries and keys.
    block += {"qwen2": width + 2 * shared, "qwen3": 2 * each}.get(kind, 0)
    positions = one("max_position_embeddings", "n_positions", other=_LEARNED.get(kind, 0)) if kind in _LEARNED else 0
    positions += 2 if kind == "opt" else 0  # its first two are for padding
    tables = 1 if known.get("tie_word_embeddings", not gated) else 2
    total = vocabulary * hidden * tables + positions * hidden + layers * block
    total += hidden if gated else 2 * hidden
    if kind == "bert":  # types of tokens, and the head's layer and norm; the other norm is the embeddings'
        total += one("type_vocab_size", other=2) * hidden + hidden * hidden + 3 * hidden + vocabulary * tables
    linear = 4 * hidden + 2 * (width + shared) + (3 if gated else 2) * (hidden + inner)
    linear -= 2 * hidden if kind == "gpt2" else 0  # queries, keys and values are one layer
    sizes = activations.block(known, hidden=hidden, width=width, shared=shared, heads=heads, inner=inner)
    return Shape(total, hidden, layers, vocabulary, linear, total - layers * block, sizes)


def estimate(recipe: Recipe, model: Shape, *, ranks: int, ranks_per_node: int) -> Estimate:
    """The memory that the recipe needs on so many ranks."""
    train = recipe.train
    assert train is not None
    assert recipe.batch is not None
    lora = recipe.lora if recipe.lora and recipe.lora.enabled else None
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
    narrow = model.dtype == "bf16" or (half and (deepspeed or stage == 3 or train.master_weights))
    return activations.Use(
        recipe.data.sequence_length,
        products=2 if half or narrow else 4,
        residual=2 if narrow else 4,
        autocast=half and not deepspeed and stage < 3 and not train.master_weights,
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


def check(recipe: Recipe, world: World, site: Site, facts: Facts, files: Files) -> tuple[str, tuple[Finding, ...]]:
    """The estimate as text; and the refusal of a run that cannot fit, before it waits in the queue."""
    if recipe.train is None:
        return "", ()
    most, model = limit(site, facts), known(files)
    if model is None:
        unchecked = " (so --gpu-memory is not checked)" if facts.gpu_memory_gb else ""
        return f"not estimated: {_unknown(recipe, files)}{unchecked}", ()
    counted = files.counted
    found = estimate(recipe, model, ranks=world.size, ranks_per_node=world.ranks_per_node)
    on = f", on GPUs of {most:g} GB" if most and found.gpu else ""
    trained = f", {counted.trained:,} of them trained" if counted and counted.trained < counted.parameters else ""
    how = "; parameters and activations are counted in the model itself" if counted else ""
    reason = "\n".join([f"an estimate for {model.parameters:,} parameters{trained}{on}{how}", *found.lines()])
    if not most or found.on_gpu <= most * _GB:
        return reason, ()
    refusal = Finding(
        f"the model does not fit: {model.parameters:,} parameters",
        wanted=f"at most {most:g} GB on each GPU "
        f"({f'site {site.name}' if facts.gpu_memory_gb is None else '--gpu-memory'})",
        found="\n".join(found.lines()),
        fix=_fitting(recipe, model, ranks=world.size, ranks_per_node=world.ranks_per_node, most=most * _GB)
        or "use more nodes, a smaller model or [lora]; or, if this estimate is wrong, --gpu-memory=0",
        code=exit_codes.CONFIG,
    )
    return reason, (refusal,)


def limit(site: Site, facts: Facts) -> float | None:
    """GB of memory on each GPU; None if unknown."""
    return site.gpu_memory_gb if facts.gpu_memory_gb is None else facts.gpu_memory_gb


def known(files: Files) -> Shape | None:
    """The sizes of the model, with what was counted in the model itself."""
    model = shape(files.configuration) if files.configuration else None
    if model and (counted := files.counted):
        return replace(model, counted=counted, parameters=counted.parameters, outside=counted.outside)
    return model


def trained(model: Shape) -> float:
    """How many parameters of the model are trained."""
    return model.counted.trained if model.counted else model.parameters


def _unknown(recipe: Recipe, files: Files) -> str:
    if files.configuration:
        return f"the size of model type {recipe.model.name or recipe.model.type} is not known"
    name = recipe.model.name or recipe.model.tokenizer or "the model"
    if name.startswith(("/", ".")):
        return f"{name} has no config.json on this machine"
    return f"{name} is not downloaded; dray prefetch RECIPE downloads it"


def _fitting(recipe: Recipe, model: Shape, *, ranks: int, ranks_per_node: int, most: float) -> str:
    """The smallest change with which the model fits: one of the list, or its first few together."""
    for change in (*_CHANGES, *accumulate(_CHANGES, operator.or_)):
        changed = recipe
        for key, value in change.items():
            table, _, name = key.partition(".")
            part = getattr(changed, table).model_copy(update={name: value})
            changed = changed.model_copy(update={table: part})
        found = estimate(changed, model, ranks=ranks, ranks_per_node=ranks_per_node)
        if found.on_gpu <= most:
            file = recipe.train and recipe.train.deepspeed and "train.strategy" in change
            settings = [
                *(["train.deepspeed="] if file else []),
                *(f"{key}={str(value).lower()}" for key, value in change.items() if value),
            ]
            return f"set {' '.join(settings)}, which takes {next(found.lines())}"
    return ""
