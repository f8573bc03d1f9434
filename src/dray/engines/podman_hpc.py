"""podman-hpc: NERSC's wrapper of Podman, with images that all nodes can read and with modules of the site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dray.engines.base import Container
from dray.engines.docker import Docker, Podman


class PodmanHpc(Podman):
    """Podman's options; modules of the site bring GPUs and the fabric."""

    name = "podman-hpc"
    schedulers = frozenset({"slurm"})
    private_network = False
    gpus: ClassVar[dict[str, list[str]]] = {**Docker.gpus, "cuda": ["--gpu"]}
    gpu_access: ClassVar[dict[str, str]] = {"cuda": "the site's module for podman-hpc, by --gpu"}
    slingshot: ClassVar[dict[str, str]] = dict.fromkeys(
        ("cuda", "cuda12"), "the site's module for podman-hpc does it, by --nccl"
    )

    def argv(self, container: Container, inner: Sequence[str]) -> list[str]:
        program, run, *options = super().argv(container, inner)
        return [program, run, *(["--nccl"] if container.fabric else []), *options]
