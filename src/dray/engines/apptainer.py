"""Apptainer and SingularityCE: the same options, another name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dray.engines.base import DEVICES, LAYER, MOUNTS, Container, Engine

_GPU: dict[str, list[str]] = {"cpu": [], "cuda": ["--nv"], "rocm": [DEVICES]}


def _layer(file: str) -> list[str]:
    """What the SIF holds, at the place where the image's Python looks for it."""
    quoted = file.replace('"', '""')
    return [f'--mount=type=bind,"src={quoted}","dst={LAYER}",image-src=/,ro'] if file else []


class Apptainer(Engine):
    """`exec` with nothing of the host inside but what the plan names, /tmp, and what the site's administrators bind:
    the user's home among it, for a program of the user's."""

    name = "apptainer"
    schedulers = frozenset({"slurm", "hosts"})
    env_prefix = "APPTAINERENV_"
    host_libraries = True
    verifies = True
    binds_layers = True
    devices: ClassVar[dict[str, str]] = {"rocm": "amd"}
    gpu_access: ClassVar[dict[str, str]] = {
        "rocm": "/dev/kfd and /dev/dri, without --rocm, which would bind the host's ROCm libraries over the wheels'"
    }

    def argv(self, container: Container, inner: Sequence[str]) -> list[str]:
        return [
            self.name,
            "--quiet",  # its INFO lines about optional helpers are nothing that a user can act on
            "exec",
            "--cleanenv",
            "--no-eval",  # else a $(...) in a variable's value is run
            f"--no-mount={'' if container.home else 'home,'}cwd",
            *_GPU[container.accelerator],
            MOUNTS,
            *_layer(container.layer),
            f"--pwd={container.folder}",
            container.image,
            *inner,
        ]

    def identify(self, image: str) -> list[str]:
        """Print the id in the SIF's header, which dray makes from the content: reading the whole file takes seconds."""
        return ["od", "--address-radix=n", "--format=x1", "--skip-bytes=48", "--read-bytes=16", image]


class Singularity(Apptainer):
    """SingularityCE."""

    name = "singularity"
    env_prefix = "SINGULARITYENV_"
