"""How the desk is: what each part is doing, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

import docker
from docker.models.containers import Container

from dray.cluster.config import CONTROLLER, Size
from dray.cluster.containers import execute, find, last_lines

_WORKS = frozenset({"idle", "mixed", "allocated", "completing", "planned", "reserved"})


@dataclass(frozen=True, kw_only=True)
class Part:
    """The controller or a node."""

    name: str
    container: str
    """Docker's word for its state, or `missing`"""
    slurm: str = ""
    """Slurm's word for the node's state"""
    gpus: str = ""
    trouble: str | None = None

    @property
    def stuck(self) -> bool:
        """It runs, but only a restart makes it answer; a drained node answers and needs none."""
        return self.container == "running" and self.trouble is not None and "drain" not in self.slurm


@dataclass(frozen=True, kw_only=True)
class Health:
    """The whole desk."""

    size: Size
    parts: tuple[Part, ...]
    slurm: str
    apptainer: str
    shared: str
    base: str

    @property
    def troubles(self) -> tuple[str, ...]:
        return tuple(f"{part.name}: {part.trouble}" for part in self.parts if part.trouble)

    @property
    def ready(self) -> bool:
        """Every part works and every node is known to Slurm."""
        return not self.troubles and all(part.slurm for part in self.parts if part.name != CONTROLLER)

    @property
    def ended(self) -> bool:
        """A container that should run does not; waiting changes nothing."""
        return any(part.container != "running" for part in self.parts)


def look(client: docker.DockerClient) -> Health | None:
    """How the desk is, or None where there is none."""
    containers = find(client)
    if not containers:
        return None
    labels = containers.get(CONTROLLER, next(iter(containers.values()))).labels
    size = Size(nodes=int(labels["dray.nodes"]), gpus_per_node=int(labels["dray.gpus-per-node"]))
    controller = _controller(containers.get(CONTROLLER))
    runs = controller.container == "running"
    said = _sinfo(containers[CONTROLLER]) if runs and not controller.trouble else {}
    nodes = (_node(name, containers.get(name), said) for name in size.node_names)
    return Health(
        size=size,
        parts=(controller, *nodes),
        slurm=_version(containers[CONTROLLER], "sinfo") if runs else "",
        apptainer=_version(containers[CONTROLLER], "apptainer") if runs else "",
        shared=labels["dray.shared"],
        base=labels["dray.base"],
    )


def _controller(container: Container | None) -> Part:
    status, trouble = _container(container)
    if container and not trouble:
        ping = execute(container, ["scontrol", "ping"])
        if ping.code != 0:
            trouble = f"slurmctld does not answer\n{(ping.out + ping.err).strip()}\n{last_lines(container)}"
    return Part(name=CONTROLLER, container=status, trouble=trouble)


def _node(name: str, container: Container | None, said: dict[str, tuple[str, str, str]]) -> Part:
    status, trouble = _container(container)
    # Without a controller to ask, a node's container is all there is to judge it by.
    # What Slurm says of a container that is gone is old.
    state, gpus, reason = ("", "", "") if trouble else said.get(name, ("", "", ""))
    if container and state and state not in _WORKS:
        trouble = f"Slurm calls it {state} ({reason})"
        if "drain" not in state:
            trouble += f"\n{last_lines(container)}"
    return Part(name=name, container=status, slurm=state, gpus=gpus, trouble=trouble)


def _container(container: Container | None) -> tuple[str, str | None]:
    if container is None:
        return "missing", "its container is gone"
    if container.status != "running":
        return container.status, f"its container is {container.status}\n{last_lines(container)}".strip()
    return container.status, None


def _sinfo(controller: Container) -> dict[str, tuple[str, str, str]]:
    lines = execute(controller, ["sinfo", "--Node", "--noheader", "--format=%N|%T|%G|%E"]).out.splitlines()
    fields = (line.split("|", 3) for line in lines)
    return {name: (state, gpus.replace("(null)", ""), reason) for name, state, gpus, reason in fields}


def _version(controller: Container, program: str) -> str:
    return execute(controller, [program, "--version"]).out.strip().rpartition(" ")[2]
