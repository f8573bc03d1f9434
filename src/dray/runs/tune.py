"""Tune a recipe: a study whose candidates are measured one after another, each in its own short run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from dray import engines
from dray.config.recipe import Recipe
from dray.config.sites import Choice
from dray.contract import exit_codes, files
from dray.contract.findings import ConfigError, DrayError, Finding
from dray.facts import Engine, Facts
from dray.planning import tune_search
from dray.planning.schema import Plan
from dray.planning.tune_search import Candidate, Figure, Space
from dray.runs import local, login, prepare, replay, status, study
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
    options: tuple[str, ...]
    """The options for `dray run`."""

    def plan(self, recipe: Recipe, folder: Path) -> Plan:
        """The plan of a candidate, with its findings."""
        return prepare.decide(recipe, self.facts, self.choice, RunPaths(folder / "001"))

    def first(self, recipe: Recipe, folder: Path) -> Plan:
        """The plan of the recipe's own setting; if its micro-batch does not fit the ranks, of the largest that does."""
        try:
            return self.plan(recipe, folder)
        except ConfigError:
            free = {"per_device": None, "gradient_accumulation_steps": None}
            batch = recipe.batch and recipe.batch.model_copy(update=free)
            return self.plan(recipe.model_copy(update={"batch": batch}), folder)


def _reason(finding: Finding) -> str:
    """The refusal in one line."""
    told = [finding.problem]
    for name, value in (("found", finding.found), ("wanted", finding.wanted)):
        if value:
            told.append(f"{name} {value.splitlines()[0]}")
    return "; ".join(told)


def _refused(told: str) -> str:
    """The refusal that `dray run` printed last, likewise."""
    problem, *more = f"\n{told}".rpartition("\ndray: ")[2].split("\n")
    lines = [line.replace(":", "", 1).split() for line in more if line.startswith(("  found:", "  wanted:"))]
    return "; ".join([problem or "dray run refused it", *map(" ".join, lines)])


def place(
    recipe: Recipe, env: Mapping[str, str], *, nodes: int | None = None, gpus_per_node: int = 0,
    gpu_memory: float | None = None, engine: Engine = "bare", here: bool = False, site: str = "",
) -> Place:  # fmt: skip
    """The nodes of this shell's allocation, also inside a batch script; with `here`, or without one, this machine."""
    env = {**env, "ENVIRONMENT": ""}  # no run of the batch script itself
    allocation = None if here else Allocation.of(env)
    in_a_step = env.get("SLURM_STEP_ID") and not Allocation.of(env)
    if env.get("SLURM_ARRAY_TASK_ID") or (in_a_step and not here):
        raise ConfigError(
            "every task would measure the same", where=f"job {env.get('SLURM_JOB_ID', '')}",
            wanted="one dray study tune, which starts the ranks itself", found="a job array, or a step of srun",
            fix="use sbatch without --array, and leave out srun; or use --local to measure on this machine only",
        )  # fmt: skip
    options = [f"--site={site}"] if site else []
    if allocation:
        allocation.require_nodes(nodes)
        if gpus_per_node:
            raise ConfigError(
                "--gpus-per-node is set by salloc; --ranks sets the number of ranks", fix="leave out --gpus-per-node"
            )
        facts, choice = login.facts(
            recipe, int(allocation.nodes), 0, site, ranks=None, options=(), gpu_memory=gpu_memory
        )
        gpus = (env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_GPUS_PER_NODE") or "0").rpartition(":")[2]
        known = {"login": "", "nodelist": allocation.nodelist, "gpus_per_node": int(gpus), "job": int(allocation.job)}
        facts = facts.model_copy(update=known)
        return Place(facts=facts, choice=choice, options=tuple(options))
    if engine not in engines.names("local"):
        raise ConfigError(
            f"dray study tune cannot use --engine {engine} here", wanted=f"one of {', '.join(engines.names('local'))}",
            found=engine, fix="leave out --engine; inside salloc the site's engine is used",
        )  # fmt: skip
    gpus_per_node = gpus_per_node or (recipe.ranks_per_node or 0 if recipe.image != "cpu" else 0)
    facts = local.facts(
        recipe, engine=engine, image=local.image_of(engine, recipe), nodes=nodes, gpus_per_node=gpus_per_node,
        site=site,
    )  # fmt: skip
    facts, choice = prepare.at_site(facts.model_copy(update={"gpu_memory_gb": gpu_memory}))
    size = (f"--nodes={facts.nodes}", f"--gpus-per-node={gpus_per_node}", f"--engine={engine}")
    return Place(facts=facts, choice=choice, options=(*size, *options))


# The search ---------------------------------------------------------------------------------------------------------


def short(recipe: Recipe, steps: int) -> Recipe:
    """The recipe for some steps, without checkpoints, evaluation and restarts."""
    table = recipe.model_dump(mode="json", exclude_unset=True)
    assert recipe.train is not None
    train = table["train"] | {
        "steps": steps, "warmup_steps": min(recipe.train.warmup_steps, steps), "log_every": 1, "eval_every": 0,
        "trackers": [], "profile": "",
    }  # fmt: skip
    train.pop("epochs", None)
    data = table.get("data", {}) | {"max_eval_samples": 1}
    data.pop("test", None)
    for key in ("scale", "tiny", "evaluate"):
        table.pop(key, None)
    table |= {"train": train, "data": data, "checkpoint": {"final": False}, "max_requeues": 0, "max_restarts": 0}
    return Recipe.model_validate_json(json.dumps(table))


@dataclass
class Tuner:
    """Measures candidates for the search, each only once."""

    folder: Path
    study: Study
    recipe: Recipe
    place: Place
    start: Candidate
    """The recipe's own setting."""
    program: Sequence[str]
    """The argv of dray."""
    known: dict[Candidate, Figure | None] = field(default_factory=dict)

    def measure(self, space: Space, *, steps: int, every: bool) -> None:
        """Measure the whole grid, or the candidates that the search chooses."""
        self.study.save(self.folder)
        for stem, recipe in (("recipe", self.recipe), ("short", short(self.recipe, WARM_UP + steps))):
            _write(replay.as_files(recipe, stem, whole=False), self.folder)
        self.study.recipe = str(self.folder / "short.toml")
        if every:
            for candidate in space.every():
                self.figure(candidate)
        else:
            tune_search.descend(space, self.figure)

    def figure(self, candidate: Candidate) -> Figure | None:
        """The candidate's speed; None if it cannot run or its losses differ."""
        if candidate in self.known:
            return self.known[candidate]
        begun = [member for member in self.study.members if (self.folder / member.run).exists()]
        if len(begun) >= _TRIES and not any(self.known.values()):
            raise none_ran(self.folder, study.look(self.folder, self.study))
        settings = tune_search.settings(self.recipe, candidate, self.start, ranks=self.study.ranks)
        changes = [f"{key}={str(value).lower()}" for key, value in candidate.differences(self.start)]
        member = Member(run=f"{len(self.study.members) + 1:03}", values=dict(candidate.values), settings=changes)
        member.more = [setting for setting in settings if setting not in changes]
        if begun:
            member.more.append("preflight.when=never")
        self.study.members.append(member)
        member.refused = self._refusal(candidate) or self._run(member)
        self.study.save(self.folder)
        row = study.look(self.folder, self.study)[-1]
        self.known[candidate] = figure(row)
        print(f"{row}: {speed(row) if self.known[candidate] else f'{row.state} {row.apart or row.why}'}", flush=True)
        return self.known[candidate]

    def _refusal(self, candidate: Candidate) -> str:
        """Why the candidate cannot start, such as a model that is too large; empty if it can."""
        try:
            recipe = tune_search.applied(self.recipe, candidate, self.start, ranks=self.study.ranks)
            if engines.get(self.place.facts.engine).image == "python":
                local.require(recipe)
            self.place.plan(recipe, self.folder).refuse()
        except ConfigError as refused:
            return _reason(refused.finding)
        return ""

    def _run(self, member: Member) -> str:
        """Run the candidate; why it was refused or ended too late. KeyboardInterrupt if it was stopped."""
        with TemporaryFile() as errors:
            code = self.study.run(self.folder, member, self.program, errors)
            errors.seek(0)
            told = errors.read().decode(errors="replace")
        sys.stderr.write(told)
        if code == exit_codes.CONFIG:
            return _refused(told)
        if code in LAST:
            self.study.save(self.folder)
            raise KeyboardInterrupt
        return "it did not end in time (--limit)" if code == _TIMEOUT else ""


def figure(row: Row) -> Figure | None:
    """The row's speed; None if it cannot run or its losses differ."""
    if row.state != status.DONE or row.apart or not row.tokens_per_s:
        return None
    return Figure(row.tokens_per_s, row.tokens_per_s * row.spread, row.memory_gb or 0.0)


def speed(row: Row) -> str:
    """The row's speed in words."""
    memory = f", {row.memory_gb:.2f} GB" if row.memory_gb else ""
    return f"{row.tokens_per_s:,.0f} tokens/s +- {row.spread:.0%}{memory}"


# The best -----------------------------------------------------------------------------------------------------------


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest row; among rows equal within noise, the row with the fewest changes."""
    known = {Candidate(tuple(row.values.items())): row for row in rows}
    figures = [(candidate, measured) for candidate, row in known.items() if (measured := figure(row))]
    start = Candidate(tuple(rows[0].values.items())) if rows else Candidate(())
    chosen = tune_search.best(figures, start)
    return known[chosen] if chosen else None


def none_ran(folder: Path, rows: Sequence[Row]) -> DrayError:
    """The error for a table in which no candidate succeeded."""
    why = "\n".join(dict.fromkeys(row.why for row in rows))
    begun = [row.run for row in rows if (folder / row.run).exists()]
    if not begun:
        return ConfigError("no candidate fits", found=why, fix="use more nodes, a smaller model or [lora]")
    return DrayError(
        "no candidate runs",
        where=folder,
        found=why,
        fix=f"dray why {shlex.quote(str(folder / begun[0]))}",
        code=exit_codes.FAILED,
    )


def require_writable(file: Path) -> None:
    """Check that the file can be written, before anything is measured."""
    if file.suffix != ".toml" or os.path.lexists(file) or not os.access(file.parent, os.W_OK):
        raise ConfigError(
            "the best setting cannot be written to this file", where=f"--out {file}",
            wanted="a new FILE.toml in a folder where you may write",
            found="it already exists" if os.path.lexists(file) else f"{file.name} in {file.parent}",
            fix="name another FILE",
        )  # fmt: skip


def write_best(folder: Path, found: Study, row: Row, file: Path, lines: Sequence[str]) -> None:
    """Write the row's setting as a recipe, under these lines as comments, and the files that it names."""
    recipe = prepare.read_recipe(folder / "recipe.toml")
    start, candidate = (Candidate(tuple(member.values.items())) for member in (found.members[0], row))
    applied = tune_search.applied(recipe, candidate, start, ranks=found.ranks)
    table = applied.model_dump(mode="json", exclude_unset=True)
    # The accumulation depends on the number of ranks; the settings of [tiny] are already in the other tables.
    table["batch"].pop("gradient_accumulation_steps")
    for key in ("scale", "tiny"):
        table.pop(key, None)
    made = replay.as_files(Recipe.model_validate_json(json.dumps(table)), file.stem, whole=False)
    made[file.name] = "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + made[file.name]
    _write(made, file.parent)


def _write(texts: Mapping[str, str], folder: Path) -> None:
    for name, text in texts.items():
        files.write_atomic(folder / name, text)
