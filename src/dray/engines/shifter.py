"""Shifter: NERSC's setuid program starts images that its gateway has pulled from a registry.

It mounts what the site's configuration names. A user's own --volume takes folders alone, and no place on a file system
that the site has mounted, so none is asked for: a folder that the container does not have is named, and ends the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import ClassVar

from dray.contract.findings import ConfigError
from dray.engines.base import MOUNTS, Container, Engine, Shell

MODULE = "shifter.module"
# NERSC's. A plugin for NCCL is linked with one version of CUDA.
_PLUGINS = {"cuda": "nccl-cu13-plugin", "cuda12": "nccl-plugin"}


class Shifter(Engine):
    """`shifter` with an image that `shifterimg pull` has fetched."""

    name = "shifter"
    image = "store"
    formats = ()
    reference = r"(docker|custom|id):[A-Za-z0-9_.:+@/-]+"  # it drops every other character, and looks for what is left
    schedulers = frozenset({"slurm"})
    script = "shifter"
    read_only = ""  # the site's mounts are what they are
    devices: ClassVar[dict[str, str]] = dict.fromkeys(("cpu", "cuda", "rocm"), "shifter")
    takes_annotations = True
    gpu_access: ClassVar[dict[str, str]] = {
        "cuda": "the site's module for Shifter, by --module",
        "rocm": "the host's /dev; ROCm itself is in the image",
    }
    fabric: ClassVar[dict[tuple[str, str], str]] = dict.fromkeys(
        (("slingshot", variant) for variant in _PLUGINS), "the site's module for Shifter does it, by --module"
    )

    def annotations(self, variant: str, fabric: str, site: Mapping[str, str]) -> dict[str, str]:
        """Shifter's modules; without this option it would use the site's own, which add an MPI to the image."""
        if unknown := set(site) - {MODULE}:
            raise ConfigError("the shifter engine does not know this annotation", wanted=MODULE, found=min(unknown))
        plugin = [_PLUGINS[variant]] if variant in _PLUGINS and fabric == "slingshot" else []
        modules = ["gpu", *plugin] if variant in _PLUGINS else ["none"]
        return {MODULE: ",".join(modules), **site}

    def argv(self, container: Container, inner: Sequence[str]) -> list[str]:
        return [
            "shifter",
            f"--image={container.image}",
            f"--module={container.annotations[MODULE]}",
            "--clearenv",
            # A pipe: not on disk, not in argv. The image's own variables would win over those that it inherits.
            Shell(f"--env-file=<(node::environment {' '.join(container.variables)})"),
            f"--workdir={container.folder}",
            "--",
            "/bin/sh",
            "-c",
            resources.files("dray.engines").joinpath("visible.sh").read_text(encoding="utf-8"),
            "sh",
            MOUNTS,
            "--",
            *inner,
        ]

    def identify(self, image: str) -> list[str]:
        return ["shifterimg", "lookup", image]
