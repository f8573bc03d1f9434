"""By how much the losses of two settings may differ: their sums have other orders, and their dropout other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray.config.recipe import Recipe

# Where a configuration does not name them, transformers takes 0.1.
_DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "opt": ("dropout",),
}


def of(recipe: Recipe, configuration: Mapping[str, Any], *, exact: float) -> tuple[float, str]:
    """By how much the losses of one step may differ, relative to their value, and why."""
    assert recipe.train is not None
    if why := _random(recipe, configuration):
        return 0.05, f"{why}, whose random numbers depend on the micro-batch"
    if recipe.train.precision != "fp32":
        return 0.02, f"{recipe.train.precision} has few digits"
    if recipe.train.tf32 and recipe.image != "cpu":
        return 2e-3, "TF32 has 10 bits of mantissa"
    return exact, "fp32"


def _random(recipe: Recipe, configuration: Mapping[str, Any]) -> str:
    names = _DROPOUT.get(str(configuration.get("model_type")), ())
    named = {name: configuration.get(name, 0.1) for name in names}
    other = {key: value for key, value in configuration.items() if "drop" in key and isinstance(value, int | float)}
    if any({**named, **other}.values()):
        return "the model has dropout"
    if recipe.lora and recipe.lora.enabled and recipe.lora.dropout:
        return "[lora] has dropout"
    return "[analog] has noise" if recipe.has_analog else ""
