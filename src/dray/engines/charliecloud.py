"""Charliecloud: ch-run starts a container in the caller's own user namespaces, without a daemon or setuid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dray.engines.base import DEVICES, MOUNTS, Container, Engine, Shell

# containers/environment has the same: a squashfs has no environment that ch-run would know.
PATH = "/opt/dray/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/layer/bin"


class Charliecloud(Engine):
    """`ch-run` of a squashfs or of a folder."""

    name = "charliecloud"
    formats = ("squashfs", "folder")
    schedulers = frozenset({"slurm"})
    script = "charliecloud"
    read_only = ""  # ch-run has no mounts that nobody may write
    unmountable = ":"
    devices: ClassVar[dict[str, str]] = dict.fromkeys(("cpu", "cuda", "rocm"), "charliecloud")
    gpu_access: ClassVar[dict[str, str]] = {
        "cuda": "the host's /dev, and the driver's libraries, copied to the node's own folder",
        "rocm": "the host's /dev; ROCm itself is in the image",
    }

    def argv(self, container: Container, inner: Sequence[str]) -> list[str]:
        return [
            "env",
            "--unset=TMPDIR",  # ch-run would show it as /tmp, and the node's own folder is in the real one
            "ch-run",
            "--unset-env=*",
            "--env-no-expand",
            f"--set-env=PATH={PATH}",
            DEVICES,
            Shell(
                f"--set-env=<(node::environment {' '.join(container.variables)})"
            ),  # a pipe: not on disk, not in argv
            MOUNTS,
            f"--cd={container.folder}",
            container.image,
            "--",
            *inner,
        ]

    def identify(self, image: str) -> list[str]:
        return ["node::identity", image]
