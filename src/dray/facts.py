"""What a probe saw: data that is passed on and never looked up again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dray import engines
from dray.contract.findings import ConfigError
from dray.hostlist import expand

_VARIABLE = "variable."
Engine = Annotated[str, AfterValidator(lambda name: engines.get(name).name)]


class Facts(BaseModel):
    """One probe's result. As text it is a `key=value` line each, which bash can write without quoting."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    scheduler: Literal["slurm", "local", "hosts"]
    """Who started the nodes, and so which variables tell a node who it is."""
    job: Annotated[int, Field(ge=0)] = 0
    """Slurm's job number."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often Slurm has requeued it."""
    nodelist: Annotated[str, Field(min_length=1)]
    """The nodes in Slurm's compressed form; the first is the master."""
    nodes: Annotated[int, Field(ge=1)]
    """How many nodes the scheduler says there are."""
    address: str | None = None
    """Address of every node, where the names do not resolve (loopback)."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs that the scheduler gave on a node."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The first node's port, where nodes share no folder in which it could tell the one it has."""
    engine: Engine
    """What starts the container."""
    image: str
    """The image's file or reference; for bare, the Python that has the training stack."""
    image_sha256: str = ""
    """The image's digest, where its record beside it tells."""
    site: str = ""
    """The cluster's profile, by name or file; empty: what Slurm calls the cluster decides."""
    cluster: str = ""
    """What Slurm calls this cluster."""
    login: str = ""
    """The machine on which nothing but the plan was made, whose name a site file may know."""
    home: str = ""
    """The user's home, which no container sees by accident."""
    variables: dict[str, str] = {}
    """The job's values of the variables that site files name in paths."""
    hf_home: str | None = None
    """Where the job's HF_HOME is."""
    environment: tuple[str, ...] = ()
    """Names of the job's variables that libraries of this field read; none enters a container by itself."""
    uid: int = 0
    gid: int = 0

    def hosts(self) -> list[str]:
        """The nodes by name; their number must be what the scheduler says."""
        hosts = expand(self.nodelist)
        if len(hosts) != self.nodes:
            raise ConfigError(
                "the node list and the node count do not agree",
                wanted=f"{self.nodes} nodes",
                found=f"{len(hosts)} in {self.nodelist}",
                fix="submit again; if it stays, SLURM_JOB_NODELIST or SLURM_JOB_NUM_NODES was changed by hand",
            )
        return hosts


def parse(text: str, *, where: str) -> Facts:
    """Facts from a probe's `key=value` lines. A value runs to the end of its line."""
    found: dict[str, str | list[str] | dict[str, str]] = {}
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key, separator, value = line.partition("=")
        if not separator:
            raise ConfigError(
                "a line of the facts is not key=value", where=f"{where}, line {number}", found=ascii(line[:60])
            )
        if key.startswith(_VARIABLE):
            variables[key.removeprefix(_VARIABLE)] = value
        elif value:
            found[key] = value.split() if key == "environment" else value
    found["variables"] = variables
    try:
        return Facts.model_validate(found)
    except ValidationError as wrong:
        raise ConfigError(
            "the facts are not usable",
            where=where,
            found="\n".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong.errors()),
            fix="slurm/probe.sh writes them, and is to be of the image's version of dray; a file of your own needs the "
            "same keys",
        ) from wrong


def to_text(facts: Facts) -> str:
    """The `key=value` lines that `parse` reads."""
    found = {**facts.model_dump(exclude_none=True, exclude={"variables"}), "environment": " ".join(facts.environment)}
    found |= {f"{_VARIABLE}{name}": value for name, value in facts.variables.items()}
    return "".join(f"{key}={value}\n" for key, value in found.items())
