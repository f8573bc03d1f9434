"""A study: several runs of one recipe that differ in ranks or settings, and their table."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Literal

from pydantic import BaseModel, Field

from dray import process
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.contract import exit_codes, files, run_folder
from dray.contract.findings import ConfigError, DrayError, counted, listed
from dray.images import store as images
from dray.runs import compare, login, metrics, prepare, source, status, store
from dray.runs import submit as queue
from dray.runs.slurm import Slurm
from dray.runs.store import Run, RunPaths, dig, is_run, make_run_folder, new_id

PARITY = 1e-4
"""The largest relative loss difference that fp32 sums in another order can cause."""
MOST = 256
"""The most runs in a study."""
# After these codes no other run begins: it would be refused too, or the user or Slurm has stopped the study.
LAST = (exit_codes.CONFIG, exit_codes.RETRY, *(128 + one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


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
    gpus_per_node: int = 0
    job: int | None = None
    task: int | None = None
    """The task number, if the job is an array."""
    refused: str = ""
    """Why it did not start, or did not end."""

    @property
    def job_id(self) -> str | None:
        """The id for Slurm's commands: 12, or 12_3."""
        task = "" if self.task is None else f"_{self.task}"
        return f"{self.job}{task}" if self.job else None

    def __str__(self) -> str:
        ranks = [counted(self.ranks, "rank")] if self.ranks else []
        return " ".join([*ranks, *self.settings]) or "the recipe's own"


class Study(BaseModel):
    """The content of study.json, or tune.json, and how its runs start: as Slurm jobs, or one after another here."""

    version: Literal[1] = 1
    kind: Literal["strong", "weak", "sweep", "tune"]
    """strong: the same global batch on any number of ranks; weak: the same batch per rank; sweep: other settings."""
    recipe: str
    settings: list[str] = []
    site: str = ""
    options: list[str] = []
    """More options of dray run."""
    sbatch: list[str] = []
    at_most: int | None = None
    """The most tasks of a job array that run at once."""
    about: str = ""
    """With tune: the number of candidates, and where they were measured."""
    ranks: int = 0
    warm_up: int = 1
    """The first logged lines of an attempt, which the speed leaves out."""
    tolerance: float = PARITY
    """The largest relative difference of losses that must agree, and why."""
    reason: str = "the recipe is fp32 and the global batch is the same"
    members: list[Member] = []

    @property
    def file(self) -> str:
        return run_folder.TUNE if self.kind == "tune" else run_folder.STUDY

    def path(self, folder: Path, member: Member) -> Path:
        """The member's run folder: beside the study's folder; that of a candidate in it."""
        return (folder if self.kind == "tune" else folder.parent) / member.run

    def begin(self, runs: Path) -> Path:
        """Name all runs, and the study's folder. ConfigError if the recipe refuses settings of one."""
        if len(self.members) > MOST:
            raise ConfigError("a study has too many runs", wanted=f"at most {MOST}", found=len(self.members))
        recipes = [self._recipe(member.settings) for member in self.members]
        folder = runs / new_id(f"{'sweep' if self.kind == 'sweep' else 'scale'}-{recipes[0].name}")
        for number, (member, recipe) in enumerate(zip(self.members, recipes, strict=True), 1):
            member.run = f"{folder.name}-{number}"
            places = {"folder": recipe.checkpoint.folder, "mirror": recipe.checkpoint.mirror}
            for key, place in places.items():
                if place:
                    member.more.append(f"checkpoint.{key}={place.rstrip('/')}/{member.run}")
        return folder

    def _recipe(self, settings: Sequence[str]) -> Recipe:
        return prepare.read_recipe(Path(self.recipe), [*self.settings, *settings])

    def run(self, folder: Path, member: Member, program: Sequence[str], errors: IO[bytes] | None = None) -> int:
        """Run one member on this machine, by `dray run`; its exit code. `errors` is for its standard error."""
        print(f"\n== {member}", flush=True)
        size = {"nodes": member.nodes, "ranks": member.ranks_per_node, "gpus-per-node": member.gpus_per_node}
        options = [f"--{name}={value}" for name, value in {**size, "site": self.site}.items() if value]
        options += [f"--runs={self.path(folder, member).parent}", *self.options]
        settings = [*self.settings, *member.settings, *member.more]
        return process.in_front([*program, "run", f"--run={member.run}", *options, self.recipe, *settings], errors)

    def run_here(self, folder: Path, program: Sequence[str]) -> int:
        """Start one run after another, by `dray run`; the exit code of one that ended the study, else 0."""
        if self.sbatch or self.at_most:
            job = os.environ.get("SLURM_JOB_ID")
            raise ConfigError(
                "--sbatch and --at-most are for jobs, but here dray submits none",
                found=f"inside job {job}" if job else "no sbatch",
                fix="leave out --sbatch and --at-most, or type it on a login node",
            )
        self.save(folder)
        code = 0
        for member in self.members:
            code = self.run(folder, member, program)
            if code in LAST:
                break
        self.keep(folder)
        return code if code in LAST else 0

    def submit(self, folder: Path) -> None:
        """Submit all runs: those with the same nodes and options as one job array, if the cluster allows such an array.

        All are planned before the first is submitted, so that a refused one leaves nothing.
        """
        queue.check(self.sbatch)
        known = login.known(self.site)
        jobs = [self._planned(folder.parent / member.run, member, known) for member in self.members]
        _report(jobs)
        code = source.look(Path(self.recipe).parent)
        self.save(folder)
        # A line for each task, as slurm/lib.sh reads it; control characters were refused before.
        lines = ["\t".join([job.plan.run, *job.submission.own]) for job in jobs]
        files.write_atomic(folder / run_folder.TASKS, "\n".join(lines) + "\n", mode=0o600)
        largest = known.conf.get("MaxArraySize", "")
        alone = largest.isdecimal() and int(largest) <= len(jobs)  # Slurm's task numbers stay below it
        arrays: dict[tuple[str, ...], list[int]] = {}
        for number, job in enumerate(jobs, 1):
            arrays.setdefault(tuple(job.argv if alone else job.array(folder)), []).append(number)
        try:
            for numbers in arrays.values():
                self._enqueue(folder, jobs[numbers[0] - 1], numbers, code)
        except (DrayError, OSError):
            # Of refused jobs no folder is left. All others may be in the queue, whatever sbatch printed.
            self.keep(folder)
            if self.members:
                print(f"\nagain: dray study show {folder}")
            raise

    def _planned(self, run: Path, member: Member, known: login.Known) -> queue.Job:
        own = [*member.settings, *member.more]
        if member.ranks_per_node:
            own.append(f"ranks_per_node={member.ranks_per_node}")
        submission = queue.Submission(
            [self.recipe, *self.settings], nodes=member.nodes, ranks=member.ranks_per_node, gpus=member.gpus_per_node,
            site=self.site, options=self.sbatch, own=own,
        )  # fmt: skip
        return queue.planned(self._recipe(own), RunPaths(run), submission, known)

    def _enqueue(self, folder: Path, job: queue.Job, numbers: list[int], code: queue.Code) -> None:
        """Submit the members with these numbers, and save their jobs at once, in case this program is killed."""
        members = [self.members[number - 1] for number in numbers]
        runs: dict[Path, int | None] = {folder.parent / member.run: None for member in members}
        argv = job.argv
        if len(members) > 1:
            runs = dict(zip(runs, numbers, strict=True))
            limit = f"%{self.at_most}" if self.at_most and self.at_most < len(members) else ""
            argv = job.array(folder, ",".join(map(str, numbers)) + limit)
        found = queue.enqueue(argv, runs, job.plan.recipe.runs.share, code)
        for member, queued in zip(members, found, strict=True):
            member.job, member.task = queued.job, queued.task
            print(f"job {member.job_id}: {member}")
        self.save(folder)

    def save(self, folder: Path) -> None:
        """Write study.json; the first time make its folder."""
        if not folder.is_dir():
            make_run_folder(folder)
        files.write_atomic(folder / self.file, self.model_dump_json(indent=1) + "\n")

    def keep(self, folder: Path) -> None:
        """Save the study with the members whose runs exist; without one, remove it."""
        self.members = [member for member in self.members if (folder.parent / member.run).exists()]
        if self.members:
            self.save(folder)
            return
        for name in (run_folder.STUDY, run_folder.TASKS):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _report(jobs: Sequence[queue.Job]) -> None:
    """Print each warning once; verify each image once, since that reads it all."""
    for image in {(job.plan.recipe.image_name, job.plan.recipe.image_digest, job.plan.engine) for job in jobs}:
        images.required(dray_home.root(), *image)
    for line in sorted({f"dray: {finding.level}: {finding}" for job in jobs for finding in job.plan.findings}):
        print(line, file=sys.stderr)


def load(folder: Path) -> Study:
    """The study in a folder."""
    tuned = folder / run_folder.TUNE
    file = tuned if tuned.exists() else folder / run_folder.STUDY
    fix = f"dray study show FOLDER, with {run_folder.STUDY} or {run_folder.TUNE} in this folder"
    return store.load(Study, file, "study", fix=fix)


def find(word: str, runs: Path) -> Path:
    """The folder of a study or of a table of `dray study tune`, by its path, its name or the beginning of it."""
    both = (run_folder.STUDY, run_folder.TUNE)
    if "/" in word or any(Path(word, file).is_file() for file in both):
        return Path(word).absolute()
    names = [path.parent.name for file in both for path in runs.glob(f"*/{file}")]
    fitting = [name for name in names if name == word] or [name for name in names if name.startswith(word)]
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
    seconds: float | None = None
    """Seconds of training."""
    step_s: float | None = None
    """Median step time of the last attempt's logged lines after the warm-up; so is the speed of all ranks."""
    tokens_per_s: float | None = None
    spread: float = 0.0
    """Median deviation from the step time, relative to it; one slow step in ten does not change it."""
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
    is_fp32: Annotated[bool, Field(exclude=True)] = False


def look(folder: Path, study: Study) -> list[Row]:
    """The current rows, in order of ranks."""
    slurm = Slurm()
    rows = [_row(study.path(folder, member), member, slurm, study.warm_up) for member in study.members]
    if study.kind in ("strong", "weak"):
        rows.sort(key=lambda row: row.ranks)
        first = next((row for row in rows if row.tokens_per_s), None)
        for row in rows:
            if first and first.tokens_per_s and row.tokens_per_s:
                row.speedup = row.tokens_per_s / first.tokens_per_s
                row.efficiency = row.speedup * first.ranks / row.ranks
    if study.kind == "strong":
        _compare([row for row in rows if row.losses], study)
    if study.kind == "tune":
        for row in rows:
            if row.state == status.DONE and None in row.losses.values():
                row.state, row.why = status.FAILED, "the loss of a step is not finite"
        _compare([row for row in rows if row.state == status.DONE and row.losses], study)
    return rows


def _row(folder: Path, member: Member, slurm: Slurm, warm_up: int) -> Row:
    run, row = Run(folder), Row.model_validate(member.model_dump())
    if is_run(folder):
        state = status.status(run, slurm)
        row.state, row.why = state.state, member.refused or state.why or ""
    elif member.refused:
        row.state, row.why = "left out", member.refused
    elif member.job:
        row.state = status.QUEUED
    lines: list[metrics.Event] = []
    for attempt in run.attempts:
        row.is_fp32 = dig(attempt.plan, "recipe", "train", "precision") == "fp32"
        lines = []
        try:
            for event in metrics.Metrics(attempt.paths.metrics):
                kind, step = event.get("event"), metrics.whole(event, "step")
                if kind == "step" and step:
                    row.loss = row.losses[step] = metrics.number(event, "loss")
                    row.memory_gb = max(row.memory_gb or 0.0, metrics.number(event, "memory_gb") or 0.0) or None
                    lines.append(event)
                elif kind == "eval":
                    row.eval_loss = metrics.number(event, "loss")
                elif kind == "end":
                    row.seconds = metrics.number(event, "train_seconds")
        except OSError as error:
            row.why = row.why or f"{attempt.paths.metrics} cannot be read: {store.reason(error)}"
    lines = lines[warm_up:] or lines
    seconds, speeds = _numbers(lines, "step_s"), _numbers(lines, "tokens_per_s")
    if seconds and speeds:
        row.step_s, row.tokens_per_s = median(seconds), median(speeds)
        row.spread = median(abs(one - row.step_s) for one in seconds) / (row.step_s or 1.0)
    return row


def _numbers(lines: Sequence[metrics.Event], name: str) -> list[float]:
    return [value for line in lines if (value := metrics.number(line, name)) is not None]


def _compare(rows: Sequence[Row], study: Study) -> None:
    """Compare the losses of each run with those of the first; in a strong study they must agree in fp32 only."""
    must_agree = study.kind == "tune" or all(row.is_fp32 for row in rows)
    for row in rows[1:]:
        found = compare.compare(row.losses, rows[0].losses, study.tolerance)
        if found.steps:
            common = {*row.losses} & {*rows[0].losses}
            finite = all(None not in (row.losses[step], rows[0].losses[step]) for step in common)
            row.difference = found.largest if finite else math.inf
        if not must_agree:
            continue
        if found.first is not None:
            ours, theirs = compare.pair(found.first_a, found.first_b)
            far = compare.difference(found.first_a, found.first_b)
            row.apart = f"step {found.first}: {ours}, but {theirs} with {rows[0]}; {far:.1e} apart"
        elif study.kind == "tune" and (found.only_a or found.only_b):
            row.apart = f"{counted(len(row.losses), 'step')}, but {len(rows[0].losses)} with {rows[0]}"
