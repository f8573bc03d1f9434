"""CSCS's Container Engine: srun starts the container that an Environment Definition File (EDF) describes.

It is Pyxis's and enroot's successor on Alps; docs.cscs.ch has its reference. node.sh is inside already.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import ClassVar

from dray.engines.base import Container
from dray.engines.pyxis import Pyxis, pairs

FILE = "edf.toml"
# The builds of NCCL's plugin that CSCS has. A plugin of the host is linked with one version of CUDA or ROCm.
# There is none for ROCm 7: rocm6 needs libamdhip64.so.6.
_PLUGINS = {"cuda": "cuda13", "cuda12": "cuda12", "rocm6": "rocm6"}
# Without it NVIDIA's hook leaves the driver's libraries out; images of NVIDIA's set it themselves.
_GPUS = {"cuda": {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}}


class Edf(Pyxis):
    """Only the inner command; the EDF has the rest."""

    name = "edf"
    takes_annotations = True
    unmountable = ",:$"  # it expands ${NAME} in every text
    gpu_access: ClassVar[dict[str, str]] = {
        "cuda": "the Container Engine's hook for NVIDIA, by NVIDIA_VISIBLE_DEVICES in the EDF",
        "rocm": "the node's devices, which the Container Engine always adds",
    }
    slingshot: ClassVar[dict[str, str]] = dict.fromkeys(
        _PLUGINS, "hooks of the Container Engine do it: cxi with the host's libfabric, aws_ofi_nccl with a plugin"
    )

    def annotations(self, variant: str, fabric: str, site: Mapping[str, str]) -> dict[str, str]:
        if fabric != "slingshot" or variant not in _PLUGINS:
            return dict(site)
        ours = {
            "com.hooks.netstack.source": "host",  # CSCS's other one needs a libcudart.so, which wheels have not
            "com.hooks.cxi.enabled": "true",
            "com.hooks.aws_ofi_nccl.enabled": "true",
            "com.hooks.aws_ofi_nccl.variant": _PLUGINS[variant],
        }
        return {**ours, **site}

    def identify(self, image: str) -> list[str]:
        """Print a hash of the squashfs' head, which has its size, its time and the place of its tables."""
        return ["od", "--address-radix=n", "--format=x1", "--read-bytes=96", image]

    def srun_options(self, container: Container) -> list[str]:
        return [f"--environment={container.folder}/{FILE}"]

    def files(self, container: Container) -> dict[str, str]:
        return {FILE: "\n".join(_edf(container)) + "\n"}


def _edf(container: Container) -> Iterator[str]:
    yield f"# The containers of run {container.run}. dray wrote this file from plan.json: change the recipe instead."
    yield f"image = {_text(container.image)}"
    yield "mounts = ["
    yield from (f"  {_text(pair)}," for pair in pairs(container))
    yield f"  {_text(f'{container.image}:{container.image}:ro')},"  # by which a node says what it has
    yield "]"
    yield f"workdir = {_text(container.folder)}"
    yield "entrypoint = false"
    yield "writable = true"  # the container's own copy, which goes at the end; hooks write there
    if container.accelerator in _GPUS:
        yield "\n[env]"
        yield from (f"{name} = {_text(value)}" for name, value in _GPUS[container.accelerator].items())
    if container.annotations:
        yield "\n[annotations]"
        yield from (f"{name} = {_text(value)}" for name, value in container.annotations.items())


def _text(value: str) -> str:
    """A string of TOML: JSON's escapes are TOML's too, but for DEL, which no plan has."""
    return json.dumps(value, ensure_ascii=False)
