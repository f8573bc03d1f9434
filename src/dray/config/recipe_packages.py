"""The Python packages that a recipe needs besides torch: an image has all of them, another Python may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dray.config.recipe import Recipe
from dray.config.training import STRATEGIES


class Package(NamedTuple):
    """A package, and which setting needs it."""

    module: str
    setting: str

    @property
    def demo(self) -> bool:
        """Whether `make demo` installs it. It leaves out DeepSpeed, which outside an image compiles its operators in
        each run, for minutes, with this machine's compiler; and what is for GPUs alone."""
        return self.module not in ("deepspeed", "aihwkit_lightning", "torchao")


def of(recipe: Recipe) -> Iterator[Package]:
    """The packages that this recipe needs."""
    if recipe.launcher in ("accelerate", "deepspeed"):
        yield Package(recipe.launcher, f"launcher = {recipe.launcher}")
    if recipe.train:
        yield Package("transformers", "[train]")
    section = "train" if recipe.train else "command"
    part = recipe.train or recipe.command
    if part and part.strategy and STRATEGIES[part.strategy].deepspeed:
        yield Package("deepspeed", f"{section}.strategy = {part.strategy}")
    if recipe.train and recipe.train.precision.startswith("fp8"):
        yield Package("torchao", f"train.precision = {recipe.train.precision}")
    if recipe.has_lora:
        yield Package("peft", "[lora]")
    if recipe.has_analog:
        yield Package("aihwkit_lightning", "[analog]")
