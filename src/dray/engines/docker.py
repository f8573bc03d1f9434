"""Docker and Podman: one container a node, on a private network where all nodes are on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dray.engines.base import DEVICES, MOUNTS, Container, Engine, Shell

LABEL = "dray.run"


def network(run: str) -> str:
    """The name of a run's private network."""
    return f"dray-{run}"


class Docker(Engine):
    """`run` in the foreground; the container is deleted when its command ends."""

    name = "docker"
    image = "store"
    formats = ()
    schedulers = frozenset({"hosts", "local"})
    read_only = "readonly"
    names_devices = True
    private_network = True
    gpus: ClassVar[dict[str, list[str]]] = {
        "cpu": [],
        "cuda": ["--gpus=all"],
        "rocm": ["--device=/dev/kfd", "--device=/dev/dri"],
    }

    def argv(self, container: Container, inner: Sequence[str]) -> list[str]:
        node = container.name_variable
        # A hostname alone is not in the network's DNS.
        private = [
            f"--network={network(container.run)}",
            Shell(f'--hostname="${node}"'),
            Shell(f'--network-alias="${node}"'),
        ]
        return [
            self.name,
            "run",
            "--rm",
            "--init",
            # A script knows only then whether it has a terminal, which Docker refuses to make up.
            *(["--interactive", Shell("${tty:+--tty}")] if container.terminal else []),
            f"--label={LABEL}={container.run}",
            *(private if container.one_machine else ["--network=host"]),
            f"--user={container.user}",
            *self.user_namespace(container.user),
            "--shm-size=1g",  # the default of 64 MB ends data workers and NCCL with a bus error
            *(self.locked_memory(container.user) if container.accelerator != "cpu" else []),
            DEVICES,  # Apptainer sees the host's; here each must be named
            *self.gpus[container.accelerator],
            *(f"--env={name}" for name in container.variables),
            MOUNTS,
            f"--workdir={container.folder}",
            container.image,
            *inner,
        ]

    def user_namespace(self, _user: str) -> list[str]:
        """Options that keep the caller's user in the container."""
        return []

    def locked_memory(self, _user: str) -> list[str]:
        """Options that let network cards register memory: Docker's limit is 8 MB, and RDMA locks the memory it uses."""
        return ["--ulimit=memlock=-1"]

    def identify(self, image: str) -> list[str]:
        return [self.name, "image", "inspect", "--format={{.Id}}", image]


class Podman(Docker):
    """Podman, also without root."""

    name = "podman"
    store_prefix = "localhost/"
    gpus: ClassVar[dict[str, list[str]]] = {**Docker.gpus, "cuda": ["--device=nvidia.com/gpu=all"]}

    def user_namespace(self, user: str) -> list[str]:
        """Without root Podman maps the caller to another user inside, unless an option keeps it."""
        return [] if user.startswith("0:") else ["--userns=keep-id"]

    def locked_memory(self, user: str) -> list[str]:
        """None without root: nobody may raise the host's limit, and a container that asks for more does not start."""
        return super().locked_memory(user) if user.startswith("0:") else ["--ulimit=host"]
