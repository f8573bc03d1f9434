"""The plan, typed: what the runner reads of plan.json, and what this node checks against it.

Named tuples, since the import of dataclasses would add a fifth to the runner's start. Their annotations are no strings
here: the reader checks each value by them.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, NamedTuple

from dray.contract import files
from dray.contract.findings import ConfigError, listed

Environ = Mapping[str, str]
Endpoint = tuple[str, int]
"""An address and a port."""


class Node(NamedTuple):
    """A node as the others reach it."""

    name: str
    address: str


class Identity(NamedTuple):
    """The variables in which a node finds who it is."""

    node: str
    nodes: str
    name: str
    cpus: str
    image: str


class World(NamedTuple):
    """The nodes, their ranks and the network between them."""

    nodes: tuple[Node, ...]
    ranks_per_node: int
    size: int
    master: str
    port: int
    interfaces: tuple[str, ...]
    rendezvous_timeout_s: int
    max_restarts: int
    cores: tuple[str, ...]
    shared_folder: bool
    identity: Identity


class Variable(NamedTuple):
    """A variable of the ranks."""

    name: str
    value: str


class Preflight(NamedTuple):
    """The recipe's preflight."""

    timeout_s: int


class Recipe(NamedTuple):
    """What the recipe sets."""

    train: dict[str, Any] | None
    hang_timeout_s: int | None
    pass_env: tuple[str, ...]


class Plan(NamedTuple):
    """One attempt at a run, as one of its nodes sees it."""

    run: str
    attempt: int
    folder: str
    scratch: str
    variant: str
    launcher: tuple[str, ...]
    command: tuple[str, ...]
    where: str
    env: tuple[Variable, ...]
    pass_env: tuple[str, ...]
    world: World
    preflight: Preflight | None
    recipe: Recipe
    digest: str
    """Of what all nodes must share of the plan."""
    me: int = 0
    """This node's number."""

    @property
    def names(self) -> list[str]:
        """The names of all nodes."""
        return [node.name for node in self.world.nodes]

    @property
    def name(self) -> str:
        """This node's name."""
        return self.world.nodes[self.me].name

    @property
    def ranks(self) -> range:
        """This node's ranks."""
        each = self.world.ranks_per_node
        return range(self.me * each, (self.me + 1) * each)


def read(path: str) -> Plan:
    """The plan in this file."""
    values = files.parse_json(files.text(path, "the plan", own=True), "the plan", path)
    try:
        return of(values)
    except TypeError as error:
        raise ConfigError("the plan is damaged", where=path, found=error, fix="submit the run again") from error


def of(values: dict[str, Any]) -> Plan:
    """The plan of these values; a missing key counts as null. TypeError: they are none."""
    plan: Plan = _typed({**values, "me": 0, "digest": ""}, Plan, "plan")
    return plan._replace(digest=_digest(values))


def node_rank(world: World) -> int:
    """This node's number in the plan, by the variables of its own task. ConfigError: the plan has another node."""
    variables = [world.identity.nodes, world.identity.node, world.identity.name]
    places = [(str(len(world.nodes)), str(place), node.name) for place, node in enumerate(world.nodes)]
    found = tuple(os.environ.get(name, "") for name in variables)
    if found not in places:
        raise ConfigError(
            "this task is not a node of the plan",
            wanted=listed(_identity(variables, values) for values in places),
            found=_identity(variables, found),
            fix="start node.sh with one task on each node of the plan: srun --nodes=N --ntasks-per-node=1; "
            "do not export these variables before it: each task has its own",
        )
    return places.index(found)


def require_command(plan: Plan) -> None:
    """Refuse a command that cannot start in the container, before every rank fails with it."""
    first, *rest = plan.command
    folder, path = plan.where, os.environ.get("PATH", os.defpath)
    script = os.path.join(folder, *rest[:1])
    places, wanted = path.split(os.pathsep), f"{first} on PATH ({path})"
    if "/" in first:
        places, wanted = [folder], f"an executable file {os.path.join(folder, first)}"
    if script.endswith(".py") and not os.path.exists(script):
        first, wanted = rest[0], f"a file {script}"
    elif any(os.access(os.path.join(place, first), os.X_OK) for place in places):
        return
    raise ConfigError(
        f"the program is not in the container: {first}",
        wanted=wanted,
        found="no such file in the container",
        fix="correct the path, or make the file executable (chmod +x). The container sees the folder where you submit, "
        "the recipe's folders and the binds that dray plan -v lists; [[binds]] in a site file add others "
        "(docs/launch.md)",
    )


def _typed(value: Any, kind: Any, key: str) -> Any:  # noqa: ANN401  any JSON value
    """The value of this key, which must be of this kind: an object as a named tuple, a list as a tuple."""
    if isinstance(kind, UnionType):
        return None if value is None else _typed(value, kind.__args__[0], key)
    origin = getattr(kind, "__origin__", kind)  # tuple, of tuple[str, ...]
    fields = getattr(kind, "_fields", ())
    wanted: Any = list if origin is tuple else dict if fields else origin
    if type(value) is not wanted:
        raise TypeError(f"{key} is {value!r:.60}, not {wanted.__name__}")
    if origin is tuple:
        return tuple(_typed(part, kind.__args__[0], key) for part in value)
    if fields:
        return kind(*(_typed(value.get(name), kind.__annotations__[name], f"{key}.{name}") for name in fields))
    return value


def _digest(values: dict[str, Any]) -> str:
    """Users, attempts and folders differ between machines of a hostfile."""
    text = json.dumps({**values, "user": "", "attempt": 0}, sort_keys=True)
    for folder in (values["folder"], values["scratch"]):
        text = text.replace(json.dumps(folder)[1:-1], "")
    return hashlib.sha256(text.encode()).hexdigest()


def _identity(names: list[str], values: Sequence[str]) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
