"""The Python packages that a recipe needs besides torch: an image has all of them, another Python may not."""

from __future__ import annotations

from typing import NamedTuple

from dray.config.recipe import Recipe
from dray.config.training import STRATEGIES


class Package(NamedTuple):
    """A package, and which setting needs it."""

    module: str
    setting: str
    without: tuple[str, ...] = ()
    """What to add to the command line to run without the package."""
    demo: bool = True
    """Whether `make demo` installs it. It leaves out DeepSpeed, which outside an image compiles its operators in each
    run, for minutes, with this machine's compiler."""


def of(recipe: Recipe) -> list[Package]:
    """The packages that this recipe needs."""
    train, packages = recipe.train, list[Package]()
    if recipe.launcher in ("accelerate", "deepspeed"):
        without = ("--launcher=torchrun", *(["accelerate="] if recipe.accelerate else []))
        setting = f"launcher = {recipe.launcher}"
        packages.append(Package(recipe.launcher, setting, without, demo=recipe.launcher != "deepspeed"))
    if train:
        packages.append(Package("transformers", "[train]"))
    for section in ("train", "command"):
        part = getattr(recipe, section)
        if part and part.strategy and STRATEGIES[part.strategy].deepspeed:
            empty = [f"{section}.{key}=" for key in ("deepspeed", "offload") if getattr(part, key, "")]
            setting = f"{section}.strategy = {part.strategy}"
            packages.append(Package("deepspeed", setting, (f"{section}.strategy=ddp", *empty), demo=False))
    if recipe.has_lora:
        packages.append(Package("peft", "[lora]", ("lora.enabled=false",)))
    if recipe.has_analog:
        packages.append(Package("aihwkit_lightning", "[analog]", ("analog.enabled=false",), demo=False))
    return packages
