"""A study: several runs of one recipe that differ in ranks or settings, and their table; to tune is one of them.

A study that tunes measures its candidates one after another, each in its own short run.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from dray import process
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.config.sites import Choice
from dray.contract import exit_codes, files, run_folder
from dray.contract.findings import ConfigError, DrayError, counted, listed
from dray.facts import Facts
from dray.images import store as images
from dray.planning import tune_search
from dray.planning.schema import Plan
from dray.planning.tune_search import Candidate, Figure, Space
from dray.runs import compare, local, metrics, prepare, replay, status, store
from dray.runs import submit as queue
from dray.runs.slurm import Allocation, Slurm
from dray.runs.store import Run, RunPaths, is_run, make_run_folder, new_id

PARITY = 1e-4
"""The largest relative loss difference that fp32 sums in another order can cause."""
# After these codes no other run begins: it would be refused too, or the user or Slurm has stopped the study.
LAST = (exit_codes.CONFIG, exit_codes.RETRY, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)
TUNE_WARM_UP = 3
_TRIES = 8  # dray gives up after so many failed runs without a success
_TIMEOUT = 124  # the exit code of coreutils' timeout


class Member(BaseModel):
    """One run of a study; for a size of 0 or None the recipe or the site decides."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")] = "run"
    """The name of its folder."""
    values: dict[str, str | int | bool] = {}
    """With tune: the keys and values of the candidate."""
    settings: list[str] = []
    """The settings of this run alone, which the table shows."""
    more: list[str] = []
    """More settings, such as checkpoint folders of its own: it must not resume from another run's."""
    ranks: int = 0
    """The ranks of all its nodes, if the runs differ in them."""
    nodes: int | None = None
    ranks_per_node: int = 0
    job_id: str = ""
    """The id for Slurm's commands: 12, or 12_3."""
    refused: str = ""
    """Why it did not start, or did not end."""

    @property
    def label(self) -> str:
        """What it differs by."""
        ranks = [counted(self.ranks, "rank")] if self.ranks else []
        return " ".join([*ranks, *self.settings]) or "the recipe's own"


class Study(BaseModel):
    """The content of study.json, and how its runs start: as Slurm jobs, or one after another here."""

    version: Literal[1] = 1
    kind: Literal["strong", "weak", "sweep", "tune"]
    """strong: the same global batch on any number of ranks; weak: the same batch per rank; sweep: other settings."""
    recipe: str
    settings: list[str] = []
    site: str = ""
    sbatch: list[str] = []
    warm_up: int = 1
    """The first logged lines of an attempt, which the speed leaves out."""
    tolerance: float | None = None
    """The largest relative difference of losses, and why; None if they need not agree."""
    reason: str = ""
    members: list[Member] = []

    def path(self, folder: Path, member: Member) -> Path:
        """The member's run folder: beside the study's folder; that of a candidate in it."""
        return (folder if self.kind == "tune" else folder.parent) / member.run

    def begin(self, runs: Path) -> Path:
        """Name all runs, and the study's folder. ConfigError if the recipe refuses settings of one."""
        recipes = [self._recipe(member.settings) for member in self.members]
        folder = runs / new_id(f"{'sweep' if self.kind == 'sweep' else 'scale'}-{recipes[0].name}")
        for number, (member, recipe) in enumerate(zip(self.members, recipes, strict=True), 1):
            member.run = f"{folder.name}-{number}"
            for key in ("folder", "mirror"):
                place = getattr(recipe.checkpoint, key)
                if place:
                    member.more.append(f"checkpoint.{key}={place.rstrip('/')}/{member.run}")
        return folder

    def _recipe(self, settings: Sequence[str]) -> Recipe:
        return prepare.read_recipe(Path(self.recipe), [*self.settings, *settings])

    def run(self, folder: Path, member: Member, program: Sequence[str]) -> int:
        """Run one member on this machine, by `dray run`; its exit code."""
        print(f"\n== {member.label}", flush=True)
        options = {
            "run": member.run, "nodes": member.nodes, "ranks": member.ranks_per_node, "site": self.site,
            "runs": self.path(folder, member).parent,
        }  # fmt: skip
        given = [f"--{name}={value}" for name, value in options.items() if value]
        return process.in_front([*program, "run", *given, self.recipe, *self.settings, *member.settings, *member.more])

    def run_here(self, folder: Path, program: Sequence[str]) -> int:
        """Start one run after another, by `dray run`; the exit code of one that ended the study, else 0."""
        self.save(folder)
        for member in self.members:
            code = self.run(folder, member, program)
            if code in LAST:
                return code
        return 0

    def submit(self, folder: Path) -> None:
        """Submit all runs: those with the same nodes and options as one job array, if the cluster allows such an array.

        All are planned before the first is submitted, so that a refused one leaves nothing.
        """
        queue.check(self.sbatch)
        known = queue.known_here(self.site)
        jobs = [self._planned(folder.parent / member.run, member, known) for member in self.members]
        _report(jobs)
        self.save(folder)
        # A line for each task, as slurm/job.sh reads it; control characters were refused before.
        lines = ["\t".join([job.plan.run, *job.submission.own]) for job in jobs]
        files.write_atomic(folder / run_folder.TASKS, "\n".join(lines) + "\n", mode=0o600)
        largest = known.conf.get("MaxArraySize", "")
        alone = largest.isdecimal() and int(largest) <= len(jobs)  # Slurm's task numbers stay below it
        arrays: dict[tuple[str, ...], list[int]] = {}
        for number, job in enumerate(jobs, 1):
            arrays.setdefault(tuple(job.argv if alone else job.array(folder)), []).append(number)
        try:
            for numbers in arrays.values():
                self._enqueue(folder, jobs[numbers[0] - 1], numbers)
        except (DrayError, OSError):
            # All but the refused jobs may be in the queue, whatever sbatch printed.
            if any((folder.parent / member.run).exists() for member in self.members):
                print(f"\nagain: dray study show {shlex.quote(str(folder))}")
            else:
                shutil.rmtree(folder)
            raise

    def _planned(self, run: Path, member: Member, known: queue.Known) -> queue.Job:
        own = [*member.settings, *member.more]
        if member.ranks_per_node:
            own.append(f"ranks_per_node={member.ranks_per_node}")
        submission = queue.Submission(
            [self.recipe, *self.settings], nodes=member.nodes, ranks=member.ranks_per_node, site=self.site,
            options=self.sbatch, own=own,
        )  # fmt: skip
        return queue.planned(self._recipe(own), RunPaths(run), submission, known)

    def _enqueue(self, folder: Path, job: queue.Job, numbers: list[int]) -> None:
        """Submit the members with these numbers, and save their jobs at once, in case this program is killed."""
        members = [self.members[number - 1] for number in numbers]
        runs: dict[Path, int | None] = {folder.parent / member.run: None for member in members}
        argv = job.argv
        if len(members) > 1:
            runs = dict(zip(runs, numbers, strict=True))
            argv = job.array(folder, ",".join(map(str, numbers)))
        found = queue.enqueue(argv, runs, job.plan.recipe.runs.share, Path(self.recipe).parent)
        for member, queued in zip(members, found, strict=True):
            member.job_id = queued.id
            print(f"job {member.job_id}: {member.label}")
        self.save(folder)

    def save(self, folder: Path) -> None:
        """Write study.json; the first time make its folder."""
        if not folder.is_dir():
            make_run_folder(folder)
        files.write_atomic(folder / run_folder.STUDY, self.model_dump_json(indent=1) + "\n")


def _report(jobs: Sequence[queue.Job]) -> None:
    """Print each warning once; verify each image once, since that reads it all."""
    for image in {(job.plan.recipe.image_name, job.plan.recipe.image_digest, job.plan.engine) for job in jobs}:
        images.required(dray_home.root(), *image)
    for line in sorted({f"dray: {finding.level}: {finding}" for job in jobs for finding in job.plan.findings}):
        print(line, file=sys.stderr)


def load(folder: Path) -> Study:
    """The study in a folder."""
    fix = f"dray study show FOLDER, with {run_folder.STUDY} in this folder"
    return store.load(Study, folder / run_folder.STUDY, "study", fix=fix)


def find(word: str, runs: Path) -> Path:
    """The folder of a study, by its path, its name or the beginning of it."""
    if "/" in word or Path(word, run_folder.STUDY).is_file():
        return Path(word).absolute()
    names = [file.parent.name for file in runs.glob(f"*/{run_folder.STUDY}")]
    fitting = [name for name in names if name.startswith(word)]
    if len(fitting) == 1:
        return runs / fitting[0]
    raise ConfigError(
        "several studies begin with this name" if fitting else "there is no such study", where=runs,
        wanted=listed(sorted(fitting or names)[::-1]), found=ascii(word), fix="--runs=FOLDER names another folder",
    )  # fmt: skip


# Its table ----------------------------------------------------------------------------------------------------------


class Row(Member):
    """The figures of one run so far."""

    state: str = "no run"
    """The state as in `dray status`; `no run` if it never started."""
    why: str = ""
    """Why it failed or was refused."""
    tokens_per_s: float | None = None
    """The median speed of all ranks, over the last attempt's logged lines after the warm-up."""
    spread: float = 0.0
    """Median deviation from the speed, relative to it; one slow step in ten does not change it."""
    memory_gb: float | None = None
    """Peak memory of rank 0."""
    speedup: float | None = None
    efficiency: float | None = None
    """Speed per rank, relative to the run with the fewest ranks."""
    loss: float | None = None
    eval_loss: float | None = None
    difference: float | None = None
    """The largest relative difference of its losses from the first run's."""
    apart: str = ""
    """Where its losses differ from the first run's, if they must agree."""
    losses: Annotated[dict[int, float | None], Field(exclude=True)] = {}


def look(folder: Path, study: Study) -> list[Row]:
    """The current rows."""
    slurm = Slurm()
    rows = [_row(study.path(folder, member), member, slurm, study.warm_up) for member in study.members]
    if study.kind in ("strong", "weak"):
        first = next((row for row in rows if row.tokens_per_s), None)
        for row in rows:
            if first and first.tokens_per_s and row.tokens_per_s and row.ranks:
                row.speedup = row.tokens_per_s / first.tokens_per_s
                row.efficiency = row.speedup * first.ranks / row.ranks
    if study.tolerance:
        for row in rows:
            if row.state == status.DONE and None in row.losses.values():
                row.state, row.why = status.FAILED, "the loss of a step is not finite"
        _compare([row for row in rows if row.losses and row.state != status.FAILED], study.tolerance)
    return rows


def _row(folder: Path, member: Member, slurm: Slurm, warm_up: int) -> Row:
    run, row = Run(folder), Row.model_validate(member.model_dump())
    if is_run(folder):
        state = status.status(run, slurm)
        row.state, row.why = state.state, member.refused or state.why or ""
    elif member.refused:
        row.state, row.why = "left out", member.refused
    speeds: list[float | None] = []
    for attempt in run.attempts:
        speeds = []
        try:
            for event in metrics.Metrics(attempt.paths.metrics):
                kind, step = event.get("event"), metrics.whole(event, "step")
                if kind == "step" and step:
                    row.loss = row.losses[step] = metrics.number(event, "loss")
                    row.memory_gb = max(row.memory_gb or 0.0, metrics.number(event, "memory_gb") or 0.0) or None
                    speeds.append(metrics.number(event, "tokens_per_s"))
                elif kind == "eval":
                    row.eval_loss = metrics.number(event, "loss")
        except OSError as error:
            row.why = row.why or f"{attempt.paths.metrics} cannot be read: {store.reason(error)}"
    measured = [speed for speed in speeds[warm_up:] or speeds if speed]
    if measured:
        row.tokens_per_s = speed = median(measured)
        row.spread = median(abs(one - speed) for one in measured) / speed
    return row


def _compare(rows: Sequence[Row], tolerance: float) -> None:
    """Compare the losses of each run with those of the first."""
    for row in rows[1:]:
        found = compare.compare(row.losses, rows[0].losses, tolerance)
        if found.steps:
            row.difference = found.largest
        if found.first is not None:
            ours, theirs = compare.pair(found.first_a, found.first_b)
            row.apart = f"step {found.first}: {ours}, but {theirs} with {rows[0].label}"


# Where tuning measures -----------------------------------------------------------------------------------------------


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


def tuning_place(
    recipe: Recipe, env: Mapping[str, str], *, nodes: int | None = None, here: bool = False, site: str = ""
) -> Place:
    """The nodes of this shell's allocation, also inside a batch script; with `here`, or without one, this machine."""
    allocation = None if here else Allocation.of({**env, "ENVIRONMENT": ""})
    if allocation:
        allocation.require_nodes(nodes)
        facts, choice = queue.job_facts(recipe, int(allocation.nodes), 0, site, ranks=None, options=(), gpu_memory=None)
        gpus = (env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_GPUS_PER_NODE") or "0").rpartition(":")[2]
        known = {"login": "", "nodelist": allocation.nodelist, "gpus_per_node": int(gpus), "job": int(allocation.job)}
        return Place(facts=facts.model_copy(update=known), choice=choice)
    gpus_here = 0 if recipe.image == "cpu" else recipe.ranks_per_node or 0
    facts = local.facts(recipe, engine="bare", nodes=nodes, gpus_per_node=gpus_here, site=site)
    facts, choice = prepare.at_site(facts)
    return Place(facts=facts, choice=choice, nodes=facts.nodes, gpus=gpus_here)


# The search of a tuning ----------------------------------------------------------------------------------------------


def _recipe_table(recipe: Recipe) -> dict[str, Any]:
    """The recipe's keys; the settings of [tiny] are already in the other tables."""
    table = recipe.model_dump(mode="json", exclude_unset=True)
    for key in ("scale", "tiny"):
        table.pop(key, None)
    return table


def _short_recipe(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The recipe for some steps, without checkpoints, evaluation and restarts."""
    table = _recipe_table(recipe)
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
        self.study.recipe = str(self._write(_short_recipe(self.recipe, TUNE_WARM_UP + steps), "short"))
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
        row = look(self.folder, self.study)[-1]
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
        row = best_row(look(self.folder, self.study))
        assert row is not None
        table = _recipe_table(tune_search.applied(self.recipe, _candidate(row), self.start, ranks=self.ranks))
        table["batch"].pop("gradient_accumulation_steps")  # it depends on the number of ranks
        return self._write(table, "best")

    def _write(self, table: dict[str, Any], stem: str) -> Path:
        recipe = Recipe.model_validate_json(json.dumps(table))
        for name, text in replay.as_files(recipe, stem, whole=False).items():
            files.write_atomic(self.folder / name, text)
        return self.folder / f"{stem}.toml"


# The best of a tuning ------------------------------------------------------------------------------------------------


def figure(row: Row) -> Figure | None:
    """The row's speed; None if it cannot run or its losses differ."""
    if row.state != status.DONE or row.apart or not row.tokens_per_s:
        return None
    return Figure(row.tokens_per_s, row.tokens_per_s * row.spread, row.memory_gb or 0.0)


def speed(row: Row) -> str:
    """The row's speed in words."""
    memory = f", {row.memory_gb:.2f} GB" if row.memory_gb else ""
    return f"{row.tokens_per_s:,.0f} tokens/s +- {row.spread:.0%}{memory}"


def best_row(rows: Sequence[Row]) -> Row | None:
    """The fastest row; among rows equal within noise, the row with the fewest changes."""
    known = {_candidate(row): row for row in rows}
    figures = [(candidate, measured) for candidate, row in known.items() if (measured := figure(row))]
    chosen = tune_search.best(figures, next(iter(known), Candidate(())))
    return known[chosen] if chosen else None


def _candidate(row: Row) -> Candidate:
    return Candidate(tuple(row.values.items()))
