"""Chooses how the loss is computed: whole logits are often the largest tensor of a run."""

from __future__ import annotations

from dray.config.recipe import Recipe
from dray.config.training import Batch
from dray.facts import Files
from dray.planning.choice import Choice
from dray.planning.estimates import memory, model_shape
from dray.planning.world import World

_LARGE = 1e9
_SHARE = 0.9
# What changes logits after the head, in transformers' configurations: the loss in parts does not know of it.
_CHANGES = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)


def chosen(
    recipe: Recipe, shares: Batch | None, files: Files, world: World, gpu_memory: float | None
) -> Choice[Recipe]:
    """The recipe with train.loss decided, and why. `gpu_memory` is in GB; None or 0 is unknown."""
    if recipe.train is None:
        return Choice(recipe, "")
    if recipe.train.loss != "auto":
        return Choice(recipe, f"{recipe.train.loss}: set in the recipe")
    kind, why = _auto(recipe, shares, files, world, gpu_memory or 0.0)
    train = recipe.train.model_copy(update={"loss": kind})
    return Choice(recipe.model_copy(update={"train": train}), f"{kind}: {why}")


def _auto(recipe: Recipe, shares: Batch | None, files: Files, world: World, gpu_memory: float) -> tuple[str, str]:
    assert recipe.train is not None
    if recipe.image == "cpu":
        return "full", "fastest on a CPU"
    if recipe.analog and recipe.analog.enabled:
        return "full", "the head may be analog"
    model = model_shape.known(files)
    if files.configuration is None or model is None:
        return "full", "the model's configuration is not known here, and the model may change logits after its head"
    if changed := changes(files):
        return "full", f"this model changes logits after its head ({changed})"
    if recipe.train.compile and shares and gpu_memory:
        return _fitting(recipe.model_copy(update={"batch": shares}), model, world, gpu_memory)
    tokens = ((shares and shares.per_device) or 1) * recipe.data.sequence_length
    size = 6.0 * tokens * model.vocabulary  # in 16 bits and in 32
    shown = f"logits of {tokens:,} tokens x {model.vocabulary:,} words would take {size / 1e9:.1f} GB"
    return ("chunked", f"whole {shown}") if size > _LARGE else ("full", f"whole {shown}")


def _fitting(recipe: Recipe, model: model_shape.Shape, world: World, gpu_memory: float) -> tuple[str, str]:
    """`full` is the fastest where it is compiled, if it leaves a tenth of the memory free."""
    assert recipe.train is not None
    train = recipe.train.model_copy(update={"loss": "full"})
    whole = recipe.model_copy(update={"train": train})
    needed = memory.estimate(whole, model, ranks=world.size, ranks_per_node=world.ranks_per_node).on_gpu / 1e9
    shown = f"compiled, the run with whole logits would take {needed:.1f} of {gpu_memory:g} GB"
    if needed <= _SHARE * gpu_memory:
        return "full", shown
    return "chunked", f"{shown}, and a tenth is to be free"


def changes(files: Files) -> str:
    """What changes the model's logits after its head; empty if nothing does."""
    raw = files.configuration or {}
    of_text = raw.get("text_config")
    raw = {**raw, **of_text} if isinstance(of_text, dict) else raw
    # 1 scales nothing, and granite's configurations say so.
    return ", ".join(f"{name} = {raw[name]}" for name in _CHANGES if raw.get(name) not in (None, 1, 1.0))
