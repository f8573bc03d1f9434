"""Tune a recipe: a study whose candidates are measured one after another, each in its own short run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dray.config.recipe import Recipe
from dray.config.sites import Choice
from dray.contract import exit_codes, files
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning import tune_search
from dray.planning.schema import Plan
from dray.planning.tune_search import Candidate, Figure, Space
from dray.runs import local, prepare, replay, requested_resources, status, study
from dray.runs.slurm import Allocation
from dray.runs.store import RunPaths
from dray.runs.study import LAST, Member, Row, Study

WARM_UP = 3
_TRIES = 8  # dray gives up after so many failed runs without a success
_TIMEOUT = 124  # the exit code of coreutils' timeout


# Where it measures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """The nodes where all candidates run, one after another."""

    facts: Facts
    choice: Choice
    nodes: int | None = None
    """`dray run --nodes`; None inside an allocation."""
    gpus: int = 0
    """GPUs per node on this machine, one rank for each."""

    def plan(self, recipe: Recipe) -> Plan:
        """The plan of a candidate, with its findings."""
        return prepare.decide(recipe, self.facts, self.choice, RunPaths(Path("001")))

    def first(self, recipe: Recipe) -> Plan:
        """The plan of the recipe's own setting; if its micro-batch does not fit the ranks, of the largest that does."""
        try:
            return self.plan(recipe)
        except ConfigError:
            batch = recipe.batch and recipe.batch.model_copy(
                update={"per_device": None, "gradient_accumulation_steps": None}
            )
            return self.plan(recipe.model_copy(update={"batch": batch}))


def place(
    recipe: Recipe, env: Mapping[str, str], *, nodes: int | None = None, here: bool = False, site: str = ""
) -> Place:
    """The nodes of this shell's allocation, also inside a batch script; with `here`, or without one, this machine."""
    allocation = None if here else Allocation.of({**env, "ENVIRONMENT": ""})
    if allocation:
        allocation.require_nodes(nodes)
        facts, choice = requested_resources.facts(
            recipe, int(allocation.nodes), 0, site, ranks=None, options=(), gpu_memory=None
        )
        gpus = (env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_GPUS_PER_NODE") or "0").rpartition(":")[2]
        known = {"login": "", "nodelist": allocation.nodelist, "gpus_per_node": int(gpus), "job": int(allocation.job)}
        return Place(facts=facts.model_copy(update=known), choice=choice)
    gpus_here = 0 if recipe.image == "cpu" else recipe.ranks_per_node or 0
    facts = local.facts(recipe, engine="bare", nodes=nodes, gpus_per_node=gpus_here, site=site)
    facts, choice = prepare.at_site(facts)
    return Place(facts=facts, choice=choice, nodes=facts.nodes, gpus=gpus_here)


# The search ---------------------------------------------------------------------------------------------------------


def _table(recipe: Recipe) -> dict[str, Any]:
    """The recipe's keys; the settings of [tiny] are already in the other tables."""
    table = recipe.model_dump(mode="json", exclude_unset=True)
    for key in ("scale", "tiny"):
        table.pop(key, None)
    return table


def _short(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The recipe for some steps, without checkpoints, evaluation and restarts."""
    table = _table(recipe)
    assert recipe.train is not None
    table["train"] |= {
        "steps": steps, "warmup_steps": min(recipe.train.warmup_steps, steps), "log_every": 1, "eval_every": 0,
        "trackers": [], "profile": "",
    }  # fmt: skip
    table["train"].pop("epochs", None)
    table["data"] = table.get("data", {}) | {"max_eval_samples": 1}
    table["data"].pop("test", None)
    table.pop("evaluate", None)
    return table | {"checkpoint": {"final": False}, "max_requeues": 0, "max_restarts": 0}


@dataclass
class Tuner:
    """Measures candidates for the search, each only once."""

    folder: Path
    study: Study
    recipe: Recipe
    place: Place
    start: Candidate
    """The recipe's own setting."""
    ranks: int
    program: Sequence[str]
    """The argv of dray."""
    known: dict[Candidate, Figure | None] = field(default_factory=dict)
    runs: int = 0
    """How many candidates were started."""

    def measure(self, space: Space, *, steps: int, every: bool) -> None:
        """Measure the whole grid, or the candidates that the search chooses."""
        self.study.save(self.folder)
        self.study.recipe = str(self._write(_short(self.recipe, WARM_UP + steps), "short"))
        if every:
            for candidate in space.every():
                self.figure(candidate)
        else:
            tune_search.descend(space, self.figure)

    def figure(self, candidate: Candidate) -> Figure | None:
        """The candidate's speed; None if it cannot run, its losses differ, or too many have failed before it."""
        if candidate in self.known:
            return self.known[candidate]
        if self.runs >= _TRIES and not any(self.known.values()):
            return None
        settings = tune_search.settings(self.recipe, candidate, self.start, ranks=self.ranks)
        changes = [f"{key}={str(value).lower()}" for key, value in candidate.differences(self.start)]
        member = Member(
            run=f"{len(self.study.members) + 1:03}", values=dict(candidate.values), settings=changes,
            more=settings, nodes=self.place.nodes, ranks_per_node=self.place.gpus,
        )  # fmt: skip
        if self.runs:
            member.more.append("preflight.when=never")
        self.study.members.append(member)
        member.refused = self._refusal(candidate) or self._run(member)
        self.study.save(self.folder)
        row = study.look(self.folder, self.study)[-1]
        self.known[candidate] = figure(row)
        print(
            f"{row.label}: {speed(row) if self.known[candidate] else f'{row.state} {row.apart or row.why}'}", flush=True
        )
        return self.known[candidate]

    def _refusal(self, candidate: Candidate) -> str:
        """Why the candidate cannot start, such as a model that is too large; empty if it can."""
        try:
            recipe = tune_search.applied(self.recipe, candidate, self.start, ranks=self.ranks)
            self.place.plan(recipe).refuse()
        except ConfigError as refused:
            return refused.finding.problem
        return ""

    def _run(self, member: Member) -> str:
        """Run the candidate; why it was refused or ended too late. KeyboardInterrupt if it was stopped."""
        self.runs += 1
        code = self.study.run(self.folder, member, self.program)
        if code in LAST and code != exit_codes.CONFIG:
            self.study.save(self.folder)
            raise KeyboardInterrupt
        return {exit_codes.CONFIG: "dray run refused it", _TIMEOUT: "it did not end in time (--limit)"}.get(code, "")

    def write_best(self) -> Path:
        """Write the best setting as a recipe, and the files that it names."""
        row = best(study.look(self.folder, self.study))
        assert row is not None
        table = _table(tune_search.applied(self.recipe, _candidate(row), self.start, ranks=self.ranks))
        table["batch"].pop("gradient_accumulation_steps")  # it depends on the number of ranks
        return self._write(table, "best")

    def _write(self, table: dict[str, Any], stem: str) -> Path:
        recipe = Recipe.model_validate_json(json.dumps(table))
        for name, text in replay.as_files(recipe, stem, whole=False).items():
            files.write_atomic(self.folder / name, text)
        return self.folder / f"{stem}.toml"


# The best -----------------------------------------------------------------------------------------------------------


def figure(row: Row) -> Figure | None:
    """The row's speed; None if it cannot run or its losses differ."""
    if row.state != status.DONE or row.apart or not row.tokens_per_s:
        return None
    return Figure(row.tokens_per_s, row.tokens_per_s * row.spread, row.memory_gb or 0.0)


def speed(row: Row) -> str:
    """The row's speed in words."""
    memory = f", {row.memory_gb:.2f} GB" if row.memory_gb else ""
    return f"{row.tokens_per_s:,.0f} tokens/s +- {row.spread:.0%}{memory}"


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest row; among rows equal within noise, the row with the fewest changes."""
    known = {_candidate(row): row for row in rows}
    figures = [(candidate, measured) for candidate, row in known.items() if (measured := figure(row))]
    chosen = tune_search.best(figures, next(iter(known), Candidate(())))
    return known[chosen] if chosen else None


def _candidate(row: Row) -> Candidate:
    return Candidate(tuple(row.values.items()))
