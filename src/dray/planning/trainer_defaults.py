"""The settings of dray's trainer that a recipe leaves open: each is decided with its reason."""

from __future__ import annotations

import re

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import Batch, Train
from dray.contract.findings import counted
from dray.contract.trainer import fsdp_nodes
from dray.facts import Facts, Files
from dray.planning.estimates import memory, model_shape
from dray.planning.estimates.memory import GB
from dray.planning.schema import Choice, World

_LARGE_LOGITS = 1e9
_MEMORY_SHARE = 0.9
_MULTIPLE = 128
# What changes logits after the head, in transformers' configurations: the loss in parts does not know of it.
_LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
_REVISION = re.compile("@([^:/]*)")
_COMMIT = re.compile("[0-9a-f]{40}")
_GIVEN = "set in the recipe"


def decide(
    recipe: Recipe, shares: Batch, world: World, *, site: Site, facts: Facts, files: Files
) -> tuple[Recipe, dict[str, str]]:
    """The recipe with all of them decided, and the reasons by name."""
    recipe, precision_why = precision(recipe, site)
    compiles = compilation(recipe)
    recipe = recipe.with_values("train", compile=compiles.value)
    kind = loss(recipe, shares, files, world, memory.limit(site, facts) or 0.0)
    recipe = recipe.with_values("train", loss=kind.value)
    multiple = vocabulary(recipe)
    recipe = recipe.with_values("model", pad_to_multiple_of=multiple.value)
    divided = recipe.model_copy(update={"batch": shares})
    return recipe, {
        "training": _training(recipe, precision_why),
        "memory": memory.reason(divided, world, site, facts, files),
        "shards": _shards(recipe, world),
        "attention": _attention(recipe),
        "compile": f"{str(compiles.value).lower()}: {compiles.why}",
        "loss": f"{kind.value}: {kind.why}",
        "vocabulary": multiple.why,
        "hub": _hub(recipe),
    }


def _train(recipe: Recipe) -> Train:
    assert recipe.train is not None
    return recipe.train


def precision(recipe: Recipe, site: Site) -> Choice[Recipe]:
    """The recipe with the type of its matrix products, and why it differs from the default."""
    train, on_cpu = recipe.train, recipe.image == "cpu"
    if train is None or "precision" in train.model_fields_set or (site.bf16 and not on_cpu):
        return Choice(recipe, "")
    changed = recipe.with_values("train", precision="fp32" if on_cpu else "fp16")
    processors = "many CPUs" if on_cpu else f"the GPUs of site {site.name}"
    return Choice(changed, f" (the recipe sets none, and {processors} emulate bf16)")


def compilation(recipe: Recipe) -> Choice[bool]:
    """Whether the model is compiled."""
    train = _train(recipe)
    if train.compile != "auto":
        return Choice(train.compile, _GIVEN)
    if recipe.image == "cpu":
        return Choice(False, "on a CPU it takes longer than it saves")
    if train.strategy == "zero3":
        return Choice(False, "zero3 gathers the weights inside each layer")
    if recipe.has_analog:
        return Choice(False, "analog layers are simulated step by step")
    return Choice(True, "each layer by itself, as the steps on GPUs are faster")


def loss(recipe: Recipe, shares: Batch, files: Files, world: World, gpu_memory: float) -> Choice[str]:
    """How the loss is computed. `gpu_memory` is in GB; 0 is unknown.

    Whole logits are often the largest tensor of a run; where they are compiled and fit, they are the fastest.
    """
    train, model = _train(recipe), model_shape.known(files)
    if train.loss != "auto":
        return Choice(train.loss, _GIVEN)
    why = ""
    if recipe.image == "cpu":
        why = "fastest on a CPU"
    elif recipe.has_analog:
        why = "the head may be analog"
    elif changes := logit_changes(files):
        why = f"this model changes logits after its head ({changes})"
    elif model is None:
        why = "the model's configuration is not known here, and the model may change logits after its head"
    if why or model is None:
        return Choice("full", why)
    if train.compile and gpu_memory:
        whole = recipe.with_values("train", loss="full").model_copy(update={"batch": shares})
        needed = memory.estimate(whole, model, ranks=world.size, ranks_per_node=world.ranks_per_node).on_gpu / GB
        why = f"compiled, the run with whole logits would take {needed:.1f} of {gpu_memory:g} GB"
        if needed <= _MEMORY_SHARE * gpu_memory:
            return Choice("full", why)
        return Choice("chunked", f"{why}, and a tenth is to be free")
    tokens = (shares.per_device or 1) * recipe.data.sequence_length
    size = 6.0 * tokens * model.vocabulary  # in 16 bits and in 32
    why = f"whole logits of {tokens:,} tokens x {model.vocabulary:,} words would take {size / GB:.1f} GB"
    return Choice("chunked" if size > _LARGE_LOGITS else "full", why)


def logit_changes(files: Files) -> str:
    """What changes the model's logits after its head; empty if nothing does."""
    raw = model_shape.completed(files.configuration or {})
    # 1 scales nothing, and granite's configurations say so.
    return ", ".join(f"{name} = {raw[name]}" for name in _LOGIT_CHANGES if raw.get(name, 1) != 1)


def vocabulary(recipe: Recipe) -> Choice[int]:
    """model.pad_to_multiple_of: in the head, GPUs multiply faster with a rounded size."""
    multiple, why = recipe.model.pad_to_multiple_of, _GIVEN
    if multiple == "auto":
        multiple = 1
        if recipe.image == "cpu":
            why = "padding makes nothing faster on a CPU"
        elif recipe.has_analog:
            why = "the head may be analog"
        else:
            multiple, why = _MULTIPLE, "GPUs are slow at products of other sizes"
    padded = f"padded in the head to a multiple of {multiple}" if multiple > 1 else "not padded"
    return Choice(multiple, f"{padded}: {why}")


def _shards(recipe: Recipe, world: World) -> str:
    """Over how many nodes fsdp shards: with fewer, less is gathered between nodes. Empty if there is no choice."""
    nodes, train = len(world.nodes), _train(recipe)
    if train.strategy != "fsdp" or nodes == 1:
        return ""
    if train.fsdp_shard == "auto":
        share = f"{fsdp_nodes.SHARE:.0%} of each rank's memory"
        return f"over the fewest nodes whose ranks hold it in {share}, measured at the start; copies on the others"
    (count,) = fsdp_nodes.nodes_of(train.fsdp_shard, nodes)
    return f"over {fsdp_nodes.text(count * world.ranks_per_node, count, nodes)}: train.fsdp_shard"


def _training(recipe: Recipe, precision_why: str) -> str:
    """The settings that decide most of the training, with those of a DeepSpeed file."""
    train, model, data = _train(recipe), recipe.model, recipe.data
    length = counted(train.steps, "step") if train.steps else counted(train.epochs or 0, "epoch")
    text = f"{length}, {train.strategy}"
    if train.offload:
        text += f", offload {train.offload}"
    text += f", {train.precision}{precision_why}"
    if train.precision == "fp32" and train.tf32 and recipe.image != "cpu":
        text += " with TF32"
    if train.deterministic:
        text += ", deterministic"
    text += f", {train.lr_scheduler_type} from {train.lr:g}"
    text += f"; tokenizer: {model.tokenizer or model.name or 'none, a token for each byte'}"
    if data.packing != "wrapped":
        text += f", packing {data.packing}"
    return text + "".join(f"; {key} {named.splitlines()[0]}" for key, named in recipe.maps().items())


def _attention(recipe: Recipe) -> str:
    """The attention that each rank chooses once it has the model and its device; its log says which."""
    attention = recipe.model.attn_implementation
    if attention not in ("auto", "sdpa"):
        return f"{attention}: model.attn_implementation"
    if not recipe.data.document_mask:
        return "sdpa, without a mask where none is needed"
    if attention == "sdpa" or recipe.image == "cpu":
        return "sdpa, with a mask for documents"
    return (
        "flex_attention with a mask for documents (only cuda's torch has flash attention for them); sdpa with a mask "
        "if the model has attention dropout, heads below 16 or no flex_attention, or the GPU is before compute "
        "capability 8.0"
    )


def _hub(recipe: Recipe) -> str:
    """Whether the recipe reads the same bytes of the hub the next time; empty if it reads nothing of the hub."""
    model = recipe.model
    revisions = {}
    for key, name in recipe.datasets().items():
        if name.startswith("hub:") or "hf://datasets/" in name:
            revision = _REVISION.search(name)
            revisions[key] = revision[1] if revision else ""
    if model.name and model.name[0] not in "/.":
        revisions["model.revision"] = model.revision
    if model.tokenizer and model.tokenizer != model.name and model.tokenizer[0] not in "/.":
        revisions["model.tokenizer_revision"] = model.tokenizer_revision
    loose = [key for key, revision in revisions.items() if not _COMMIT.fullmatch(revision)]
    if loose:
        return f"not pinned to a commit: {', '.join(loose)}; `dray data prefetch` prints the commits"
    return "all models and datasets are pinned to commits" if revisions else ""
