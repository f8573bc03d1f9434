"""What a model learns. An objective is one file: its name is the value of train.objective, its class is OBJECTIVE."""

from __future__ import annotations

from importlib import import_module

from dray.train.objectives.base import Objective


def named(name: str) -> type[Objective]:
    """The class of an objective."""
    found: type[Objective] = import_module(f"{__name__}.{name}").OBJECTIVE
    return found
