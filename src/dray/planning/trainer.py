"""The settings of dray's trainer that a recipe leaves open: each is decided with its reason."""

from __future__ import annotations

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import Batch
from dray.contract import sharding
from dray.contract.findings import counted
from dray.facts import Facts, Files
from dray.planning.choice import Choice
from dray.planning.estimates import memory, model_shape
from dray.planning.world import World

_LARGE_LOGITS = 1e9
_MEMORY_SHARE = 0.9
_MULTIPLE = 128
_GB = 10**9
# What changes logits after the head, in transformers' configurations: the loss in parts does not know of it.
_LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)


def decide(
    recipe: Recipe, shares: Batch | None, world: World, *, site: Site, facts: Facts, files: Files
) -> tuple[Recipe, dict[str, str]]:
    """The recipe with all of them decided, and the reasons by name; those of a command are empty."""
    if recipe.train is None:
        return recipe, {}
    recipe, precision_why = precision(recipe, site)
    recipe, compile_why = compilation(recipe)
    recipe, loss_why = loss(recipe, shares, files, world, memory.limit(site, facts))
    recipe, vocabulary_why = vocabulary(recipe, files)
    divided = recipe.model_copy(update={"batch": shares})
    return recipe, {
        "training": _training(recipe, precision_why),
        "memory": memory.reason(divided, world, site, facts, files),
        "shards": _shards(recipe, world, site, facts, files),
        "attention": _attention(recipe),
        "compile": compile_why,
        "loss": loss_why,
        "vocabulary": vocabulary_why,
    }


def precision(recipe: Recipe, site: Site) -> Choice[Recipe]:
    """The recipe with the type of its matrix products, and why it differs from the default."""
    train, on_cpu = recipe.train, ACCELERATORS[recipe.image] == "cpu"
    if train is None or "precision" in train.model_fields_set:
        return Choice(recipe, "")
    if on_cpu:
        return Choice(recipe.with_values("train", precision="fp32"), _sets_none("many CPUs emulate"))
    if emulates_bf16(recipe, site):
        why = _sets_none(f"the GPUs of site {site.name} emulate")
        return Choice(recipe.with_values("train", precision="fp16"), why)
    return Choice(recipe, "")


def _sets_none(emulate: str) -> str:
    return f" (the recipe sets none, and {emulate} bf16)"


def emulates_bf16(recipe: Recipe, site: Site) -> bool:
    """Whether the GPUs of the run emulate bf16."""
    return not site.bf16 and ACCELERATORS[recipe.image] != "cpu"


def compilation(recipe: Recipe) -> Choice[Recipe]:
    """The recipe with train.compile decided, and why."""
    assert recipe.train is not None
    compiles, why = recipe.train.compile, "set in the recipe"
    if compiles == "auto":
        compiles, why = False, ""
        if ACCELERATORS[recipe.image] == "cpu":
            why = "on a CPU it takes longer than it saves"
        elif recipe.train.strategy == "zero3":
            why = "zero3 gathers the weights inside each layer"
        elif recipe.has_analog:
            why = "analog layers are simulated step by step"
        else:
            compiles, why = True, "each layer by itself, as the steps on GPUs are faster"
    return Choice(recipe.with_values("train", compile=compiles), f"{str(compiles).lower()}: {why}")


def loss(recipe: Recipe, shares: Batch | None, files: Files, world: World, gpu_memory: float | None) -> Choice[Recipe]:
    """The recipe with train.loss decided, and why. `gpu_memory` is in GB; None or 0 is unknown."""
    assert recipe.train is not None
    kind: str = recipe.train.loss
    why = "set in the recipe"
    if kind == "auto":
        kind, why = _loss(recipe, shares, files, world, gpu_memory or 0.0)
    return Choice(recipe.with_values("train", loss=kind), f"{kind}: {why}")


def _loss(recipe: Recipe, shares: Batch | None, files: Files, world: World, gpu_memory: float) -> tuple[str, str]:
    """Whole logits are often the largest tensor of a run; where they are compiled and fit, they are the fastest."""
    assert recipe.train is not None
    model, why = model_shape.known(files), ""
    if recipe.image == "cpu":
        why = "fastest on a CPU"
    elif recipe.has_analog:
        why = "the head may be analog"
    elif model is None:
        why = "the model's configuration is not known here, and the model may change logits after its head"
    elif changes := logit_changes(files):
        why = f"this model changes logits after its head ({changes})"
    if why or model is None:
        return "full", why
    if recipe.train.compile and shares and gpu_memory:
        whole = recipe.with_values("train", loss="full").model_copy(update={"batch": shares})
        needed = memory.estimate(whole, model, ranks=world.size, ranks_per_node=world.ranks_per_node).on_gpu / _GB
        shown = f"compiled, the run with whole logits would take {needed:.1f} of {gpu_memory:g} GB"
        if needed <= _MEMORY_SHARE * gpu_memory:
            return "full", shown
        return "chunked", f"{shown}, and a tenth is to be free"
    tokens = ((shares and shares.per_device) or 1) * recipe.data.sequence_length
    size = 6.0 * tokens * model.vocabulary  # in 16 bits and in 32
    shown = f"whole logits of {tokens:,} tokens x {model.vocabulary:,} words would take {size / _GB:.1f} GB"
    return ("chunked" if size > _LARGE_LOGITS else "full"), shown


def logit_changes(files: Files) -> str:
    """What changes the model's logits after its head; empty if nothing does."""
    raw = model_shape.of_text(files.configuration or {})
    # 1 scales nothing, and granite's configurations say so.
    return ", ".join(f"{name} = {raw[name]}" for name in _LOGIT_CHANGES if raw.get(name) not in (None, 1, 1.0))


def vocabulary(recipe: Recipe, files: Files) -> Choice[Recipe]:
    """The recipe with model.pad_to_multiple_of decided, and why."""
    assert recipe.train is not None
    multiple, why = recipe.model.pad_to_multiple_of, "set in the recipe"
    if multiple == "auto":
        multiple, why = 1, ""
        if recipe.image == "cpu":
            why = "padding makes nothing faster on a CPU"
        elif recipe.has_analog:
            why = "the head may be analog"
        else:
            multiple, why = _MULTIPLE, "GPUs are slow at products of other sizes"
    recipe = recipe.with_values("model", pad_to_multiple_of=multiple)
    if multiple <= 1:
        return Choice(recipe, f"not padded: {why}")
    model = model_shape.known(files)
    size = f" ({model.vocabulary:,} words -> {memory.padded(recipe, model):,})" if model else ""
    return Choice(recipe, f"padded in the head to a multiple of {multiple}{size}: {why}")


def _shards(recipe: Recipe, world: World, site: Site, facts: Facts, files: Files) -> str:
    """Over how many nodes fsdp shards: with fewer, less is gathered between nodes. Empty if there is no choice."""
    nodes, train = len(world.nodes), recipe.train
    if train is None or train.strategy != "fsdp" or nodes == 1:
        return ""
    if train.fsdp_shard != "auto":
        (count,) = sharding.nodes_of(train.fsdp_shard, nodes)
        return f"{_over(world, count)}: train.fsdp_shard"
    limit, model = memory.limit(site, facts), model_shape.known(files)
    share = f"{sharding.SHARE:.0%} of each rank's memory"
    if not limit or model is None:
        return f"over the fewest nodes whose ranks hold it in {share}, measured at the start; copies on the others"
    # As the trainer counts it, in its leanest way.
    held = (4 if recipe.model.dtype != "bf16" else 2) * (model.parameters + 3 * model_shape.trained(model))
    most = sharding.SHARE * limit * _GB * world.ranks_per_node
    least = next((count for count in sharding.nodes_of("auto", nodes) if held / count <= most), nodes)
    return (
        f"{_over(world, least)}: the fewest nodes where {share} ({limit:g} GB) holds its share of the "
        f"{held / _GB:.0f} GB; the trainer measures the memory itself"
    )


def _over(world: World, nodes: int) -> str:
    each, of = world.ranks_per_node, len(world.nodes)
    copies = f", {of // nodes} copies of the model" if nodes < of else ""
    return f"over {sharding.text(nodes * each, nodes, of)}{copies}"


def _training(recipe: Recipe, precision_why: str) -> str:
    """The settings that decide most of the training, with those of a DeepSpeed file."""
    train, model, data = recipe.train, recipe.model, recipe.data
    assert train is not None
    length = counted(train.steps, "step") if train.steps else counted(train.epochs or 0, "epoch")
    offload = f", offload {train.offload}" if train.offload else ""
    tokenizer = model.tokenizer or model.name or "none, a token for each byte"
    schedule = f"{train.lr_scheduler_type} from {train.lr:g}"
    tf32 = " with TF32" if train.precision == "fp32" and train.tf32 and recipe.image != "cpu" else ""
    same = ", deterministic" if train.deterministic else ""
    kind = f"{train.precision}{precision_why}{tf32}{same}"
    packing = "" if data.packing == "wrapped" else f", packing {data.packing}"
    rows = "".join(f"; {key} {named.partition(chr(10))[0]}" for key, named in recipe.maps().items())
    return f"{length}, {train.strategy}{offload}, {kind}, {schedule}; tokenizer: {tokenizer}{packing}{rows}"


def _attention(recipe: Recipe) -> str:
    """The attention that each rank chooses once it has the model and its device; its log says which."""
    model = recipe.model.attn_implementation
    if model not in ("auto", "sdpa"):
        return f"{model}: model.attn_implementation"
    if not recipe.data.document_mask:
        return "sdpa, without a mask where none is needed"
    if model == "sdpa" or recipe.image == "cpu":
        return "sdpa, with a mask for documents"
    return (
        "flex_attention with a mask for documents (only cuda's torch has flash attention for them); sdpa with a mask "
        "if the model has attention dropout, heads below 16 or no flex_attention, or the GPU is before compute "
        "capability 8.0"
    )
