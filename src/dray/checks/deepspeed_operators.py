"""Checks that DeepSpeed loads the operators that the build has compiled; compiles none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import ModuleType

import torch

from dray.checks import device
from dray.checks.run_check import Skip, check
from dray.contract.findings import Finding, UnfitError


def results() -> Iterator[Finding]:
    """One result for each prebuilt operator. A run that uses another one compiles it."""
    # Without a GPU DeepSpeed would choose the CPU's operators.
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.accelerator() == "cpu" else "cuda")
    built = import_module("deepspeed.git_version_info")
    builders = import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
    for name, installed in sorted(built.installed_ops.items()):
        if installed:
            yield check(f"deepspeed {name}", partial(_loads, name, builders, built), fix="build the image again")


def _loads(name: str, builders: dict[str, ModuleType], built: ModuleType) -> str:
    accelerator = os.environ["DS_ACCELERATOR"]
    if accelerator != built.accelerator_name:
        raise UnfitError(
            f"prebuilt for {built.accelerator_name}, so a run on this machine compiles it again",
            wanted=accelerator,
            fix=f"build the image with DS_ACCELERATOR={accelerator}; unset DS_ACCELERATOR if you have set it",
        )
    try:
        builders[name].load()
    except (ImportError, OSError) as error:
        if accelerator == "cuda" and not torch.cuda.device_count():
            raise Skip(f"needs a device: {error}") from None
        raise
    return "prebuilt, loads"
