"""Whether the head's vocabulary is padded: products of round sizes are faster on GPUs."""

from __future__ import annotations

from dray.config.recipe import Recipe
from dray.facts import Files
from dray.planning.choice import Choice
from dray.planning.estimates import memory, model_shape

_MULTIPLE = 128


def chosen(recipe: Recipe, files: Files) -> Choice[Recipe]:
    """The recipe with model.pad_to_multiple_of decided, and why."""
    if recipe.train is None:
        return Choice(recipe, "")
    multiple, why = _decided(recipe)
    model = recipe.model.model_copy(update={"pad_to_multiple_of": multiple})
    recipe = recipe.model_copy(update={"model": model})
    if multiple <= 1:
        return Choice(recipe, f"not padded: {why}")
    known = model_shape.of(files.configuration) if files.configuration else None
    size = f" ({known.vocabulary:,} words -> {memory.padded(recipe, known):,})" if known else ""
    return Choice(recipe, f"padded in the head to a multiple of {multiple}{size}: {why}")


def _decided(recipe: Recipe) -> tuple[int, str]:
    assert recipe.train is not None
    asked = recipe.model.pad_to_multiple_of
    if asked != "auto":
        return asked, "set in the recipe"
    if recipe.image == "cpu":
        return 1, "padding makes nothing faster on a CPU"
    if recipe.analog and recipe.analog.enabled:
        return 1, "the head may be analog"
    if recipe.train.loss == "triton":
        return 1, "Triton's kernels take any size"
    return _MULTIPLE, "GPUs are slow at products of other sizes"
