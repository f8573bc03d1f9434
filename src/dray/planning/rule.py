"""A rule: what it reads, and the findings that it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from dray import engines
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.engines.base import Engine
from dray.facts import Facts, Files
from dray.planning.schema import Plan


class Planned(NamedTuple):
    """A plan, and what it was made from."""

    plan: Plan
    site: Site
    facts: Facts
    files: Files

    @property
    def recipe(self) -> Recipe:
        """The recipe with every choice made."""
        return self.plan.recipe

    @property
    def engine(self) -> Engine:
        """What starts the container."""
        return engines.get(self.facts.engine)


Rule = Callable[[Planned], Iterator[Finding]]


def refusal(problem: str, *, wanted: str, found: str, fix: str, where: str = "") -> Finding:
    """A finding with which the run must not start."""
    return Finding(problem, where=where, wanted=wanted, found=found, fix=fix, code=exit_codes.CONFIG)


def note(problem: str, *, found: str = "", fix: str = "", source: str = "") -> Finding:
    """A finding that stops nothing."""
    return Finding(problem, found=found, fix=fix, source=source, kind="note")
