"""DeepSpeed's operators, loaded its own way: what the build has made is taken, nothing is compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import ModuleType

import torch

from dray.checks import device
from dray.checks.result import Result, Skip, Unfit, attempt

_STUB = "deepspeed_not_implemented"


def results() -> Iterator[Result]:
    """One line an operator that was prebuilt, and one for all others."""
    # Without a GPU DeepSpeed would take itself for a CPU's, and leave the GPU's operators aside.
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.accelerator() == "cpu" else "cuda")
    built = import_module("deepspeed.git_version_info")
    builders = import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
    ready = sorted(name for name, done in built.installed_ops.items() if done)
    for name in ready:
        yield attempt(f"deepspeed {name}", partial(_loads, name, builders, built), fix="build the image again")
    others = sorted(builders.keys() - {*ready, _STUB})
    yield Result(
        check="deepspeed",
        state="skip",
        found=f"not prebuilt, so a run that asks for one has to compile it: {', '.join(others) or 'none'}",
    )


def _loads(name: str, builders: dict[str, ModuleType], built: ModuleType) -> str:
    accelerator = os.environ["DS_ACCELERATOR"]
    if accelerator != built.accelerator_name:
        raise Unfit(
            f"prebuilt for {built.accelerator_name}, so that a run here compiles it again",
            wanted=accelerator,
            fix=f"build the image with DS_ACCELERATOR={accelerator}; unset DS_ACCELERATOR where you have set it",
        )
    try:
        builders[name].load()
    except (ImportError, OSError) as error:
        if accelerator == "cuda" and not torch.cuda.device_count():
            raise Skip(f"needs a device: {error}") from None
        raise
    return "prebuilt, loads"
