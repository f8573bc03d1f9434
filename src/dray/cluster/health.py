"""The health of the local cluster: the state of each machine, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

import docker
from docker.models.containers import Container

from dray.cluster.containers import execute, find, last_lines
from dray.cluster.slurm_conf import CONTROLLER, Size

_WORKS = frozenset({"idle", "mixed", "allocated", "completing", "planned", "reserved"})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The controller or a node."""

    name: str
    container: str
    """Its state as Docker names it, or `missing`."""
    slurm: str = ""
    """The node's state as Slurm names it."""
    gpus: str = ""
    problem: str | None = None

    @property
    def stuck(self) -> bool:
        """Whether it runs but does not answer, and so needs a restart. A drained node answers."""
        return self.container == "running" and self.problem is not None and "drain" not in self.slurm


@dataclass(frozen=True, kw_only=True)
class Health:
    """The whole cluster."""

    size: Size
    machines: tuple[Machine, ...]
    slurm: str
    apptainer: str
    shared: str
    base: str

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(f"{machine.name}: {machine.problem}" for machine in self.machines if machine.problem)

    @property
    def ready(self) -> bool:
        """Whether every machine works and Slurm knows every node."""
        return not self.problems and all(one.slurm for one in self.machines if one.name != CONTROLLER)

    @property
    def ended(self) -> bool:
        """Whether a container has stopped, so that waiting is useless."""
        return any(machine.container != "running" for machine in self.machines)


def health(client: docker.DockerClient) -> Health | None:
    """None if there is no cluster."""
    containers = find(client)
    if not containers:
        return None
    labels = containers.get(CONTROLLER, next(iter(containers.values()))).labels
    size = Size(nodes=int(labels["dray.nodes"]), gpus_per_node=int(labels["dray.gpus-per-node"]))
    controller = _controller(containers.get(CONTROLLER))
    runs = controller.container == "running"
    states = _sinfo(containers[CONTROLLER]) if runs and not controller.problem else {}
    nodes = (_node(name, containers.get(name), states) for name in size.node_names)
    return Health(
        size=size,
        machines=(controller, *nodes),
        slurm=_version(containers[CONTROLLER], "sinfo") if runs else "",
        apptainer=_version(containers[CONTROLLER], "apptainer") if runs else "",
        shared=labels["dray.shared"],
        base=labels["dray.base"],
    )


def _controller(container: Container | None) -> Machine:
    status, problem = _container(container)
    if container and not problem:
        ping = execute(container, ["scontrol", "ping"])
        if ping.code != 0:
            problem = f"slurmctld does not answer\n{(ping.out + ping.err).strip()}\n{last_lines(container)}"
    return Machine(name=CONTROLLER, container=status, problem=problem)


def _node(name: str, container: Container | None, states: dict[str, tuple[str, str, str]]) -> Machine:
    status, problem = _container(container)
    # Without a controller only the container counts. Slurm's state of a stopped container is out of date.
    state, gpus, reason = ("", "", "") if problem else states.get(name, ("", "", ""))
    if container and state and state not in _WORKS:
        problem = f"its state in Slurm is {state} ({reason})"
        if "drain" not in state:
            problem += f"\n{last_lines(container)}"
    return Machine(name=name, container=status, slurm=state, gpus=gpus, problem=problem)


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
