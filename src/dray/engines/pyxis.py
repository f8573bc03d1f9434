"""Pyxis: Slurm itself starts the container, by options of srun; node.sh is then inside already."""

from __future__ import annotations

from collections.abc import Sequence

from dray.engines.base import Container, Engine


class Pyxis(Engine):
    """Only the inner command; the rest are srun's options."""

    name = "pyxis"
    formats = ("squashfs",)
    schedulers = frozenset({"slurm"})
    isolates_env = False
    script_mounts = False
    unmountable = ",:"

    def argv(self, _container: Container, inner: Sequence[str]) -> list[str]:
        return list(inner)

    def srun_options(self, container: Container) -> list[str]:
        return [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(pairs(container))}",
            f"--container-workdir={container.folder}",
            *([] if container.home else ["--no-container-mount-home"]),
            "--no-container-remap-root",
            "--container-writable",  # of the container's own copy, which goes at the end
        ]


def pairs(container: Container) -> list[str]:
    """Each mount as SOURCE:TARGET. Slurm mounts before anything of ours runs on the node: what only some nodes have is
    left out."""
    return [f"{path}:{path}{'' if write else ':ro'}" for path, write in container.mounts]
