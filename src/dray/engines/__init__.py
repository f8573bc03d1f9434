"""The engines, which start containers. A new one is a class in a file of its own, and a line in `_ALL`."""

from __future__ import annotations

from dray.contract.findings import ConfigError, listed, nearest
from dray.engines.apptainer import Apptainer, Singularity
from dray.engines.bare import Bare
from dray.engines.base import Engine
from dray.engines.docker import Docker, Podman
from dray.engines.edf import Edf
from dray.engines.podman_hpc import PodmanHpc
from dray.engines.pyxis import Pyxis

_ALL: tuple[Engine, ...] = (
    Bare(),
    Docker(),
    Podman(),
    Apptainer(),
    Singularity(),
    Pyxis(),
    Edf(),
    PodmanHpc(),
)
_BY_NAME = {engine.name: engine for engine in _ALL}


def get(name: str) -> Engine:
    """The engine of this name."""
    if name not in _BY_NAME:
        fix = nearest(name, _BY_NAME) or "apptainer"
        raise ConfigError("there is no such engine", wanted=listed(_BY_NAME), found=name, fix=fix)
    return _BY_NAME[name]


def names(*schedulers: str) -> list[str]:
    """The names of the engines that work with one of these schedulers; without schedulers, all."""
    return [engine.name for engine in _ALL if not schedulers or engine.schedulers & {*schedulers}]
