"""What starts a container: each engine turns a plan and an inner command into one command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dray.engines import apptainer, docker
from dray.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`prefix` before a variable's name in the shell makes the engine hand it in; `argv` starts the container."""

    prefix: str
    argv: Callable[[Plan, Sequence[str]], list[str]]
    identify: Callable[[Plan], list[str]] | None = None


def _inner(_plan: Plan, inner: Sequence[str]) -> list[str]:
    """There is no container, or Slurm has started it."""
    return list(inner)


_ENGINES = {
    "apptainer": Engine(prefix="APPTAINERENV_", argv=apptainer.argv, identify=apptainer.identify),
    "singularity": Engine(prefix="SINGULARITYENV_", argv=apptainer.argv, identify=apptainer.identify),
    "docker": Engine(prefix="", argv=docker.argv, identify=docker.identify),
    "podman": Engine(prefix="", argv=docker.argv, identify=docker.identify),
    "pyxis": Engine(prefix="", argv=_inner),
    "bare": Engine(prefix="", argv=_inner),
}


def of(plan: Plan) -> Engine:
    """The plan's engine."""
    return _ENGINES[plan.engine]
