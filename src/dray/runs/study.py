"""A study: several runs of one recipe that differ in ranks or settings, and their table."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from dray import process
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.contract import exit_codes, files, run_folder
from dray.contract.findings import ConfigError, DrayError, counted, listed
from dray.images import store as images
from dray.runs import effect, login, metrics, source, status, store, write
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
    """The name of its folder, beside the study's folder."""
    settings: list[str] = []
    """The settings of this run alone."""
    checkpoints: list[str] = []
    """Settings that give it checkpoint folders of its own: it must not resume from another run's."""
    ranks: int = 0
    """The ranks of all its nodes, if the runs differ in them."""
    nodes: int | None = None
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    job: int | None = None
    task: int | None = None
    """The task number, if the job is an array."""

    @property
    def job_id(self) -> str | None:
        """The id for Slurm's commands: 12, or 12_3."""
        task = "" if self.task is None else f"_{self.task}"
        return f"{self.job}{task}" if self.job else None

    def __str__(self) -> str:
        ranks = [counted(self.ranks, "rank")] if self.ranks else []
        return " ".join([*ranks, *self.settings])


class Study(BaseModel):
    """The content of study.json, and how its runs start: as Slurm jobs, or one after another here."""

    version: int = 1
    kind: Literal["strong", "weak", "sweep"]
    """strong: the same global batch on any number of ranks; weak: the same batch per rank; sweep: other settings."""
    recipe: str
    settings: list[str] = []
    site: str = ""
    sbatch: list[str] = []
    at_most: int | None = None
    """The most tasks of a job array that run at once."""
    members: list[Member] = []

    def begin(self, runs: Path) -> Path:
        """Name all runs, and make the study's folder. ConfigError if the recipe refuses settings of one."""
        if len(self.members) > MOST:
            raise ConfigError("a study has too many runs", wanted=f"at most {MOST}", found=len(self.members))
        recipes = [self._recipe(member.settings) for member in self.members]
        folder = runs / new_id(f"{'sweep' if self.kind == 'sweep' else 'scale'}-{recipes[0].name}")
        for number, (member, recipe) in enumerate(zip(self.members, recipes, strict=True), 1):
            member.run = f"{folder.name}-{number}"
            places = {"folder": recipe.checkpoint.folder, "mirror": recipe.checkpoint.mirror}
            for key, place in places.items():
                if place:
                    member.checkpoints.append(f"checkpoint.{key}={place.rstrip('/')}/{member.run}")
        return folder

    def _recipe(self, settings: Sequence[str]) -> Recipe:
        return write.read_recipe(Path(self.recipe), [*self.settings, *settings])

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
            print(f"\n== {member}", flush=True)
            size = {"nodes": member.nodes, "ranks": member.ranks_per_node, "gpus-per-node": member.gpus_per_node}
            options = [f"--{name}={value}" for name, value in {**size, "site": self.site}.items() if value]
            words = [f"--runs={folder.parent}", self.recipe, *self.settings, *member.settings, *member.checkpoints]
            code = process.in_front([*program, "run", f"--run={member.run}", *options, *words])
            if code in LAST:
                break
        self.keep(folder)
        return code if code in LAST else 0

    def submit(self, folder: Path) -> None:
        """Submit all runs: those with the same nodes and options as one job array.

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
        arrays: dict[tuple[str, ...], list[int]] = {}
        for number, job in enumerate(jobs, 1):
            arrays.setdefault(tuple(job.array(folder)), []).append(number)
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
        own = [*member.settings, *member.checkpoints]
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
        files.write_atomic(folder / run_folder.STUDY, self.model_dump_json(indent=1) + "\n")

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
    fix = f"name a folder with {run_folder.STUDY} in it: dray study show STUDY"
    return store.load(Study, folder / run_folder.STUDY, "study", fix=fix)


def find(word: str, runs: Path) -> Path:
    """The folder of a study or of a table of `dray study tune`, by its path, its name or the beginning of it."""
    if "/" in word or Path(word).is_dir():
        return Path(word).absolute()
    names = sorted(path.parent.name for file in (run_folder.STUDY, run_folder.TUNE) for path in runs.glob(f"*/{file}"))
    fitting = [name for name in names if name.startswith(word)]
    if word in names or len(fitting) == 1:
        return runs / (word if word in names else fitting[0])
    raise ConfigError(
        "several studies begin with this name" if fitting else "there is no such study",
        where=runs, found=ascii(word), wanted=listed((fitting or names)[::-1]), fix="--runs=FOLDER names another folder",
    )  # fmt: skip


# Its table ----------------------------------------------------------------------------------------------------------


class Row(Member):
    """The figures of one run so far."""

    state: str = "no run"
    """The state as in `dray status`; `no run` if it never started."""
    seconds: float | None = None
    """Seconds of training."""
    step_s: float | None = None
    tokens_per_s: float | None = None
    """Speed of all ranks: the median over the logged lines except the first, which has the warm-up."""
    speedup: float | None = None
    efficiency: float | None = None
    """Speed per rank, relative to the run with the fewest ranks."""
    loss: float | None = None
    eval_loss: float | None = None
    losses: Annotated[dict[int, float | None], Field(exclude=True)] = {}
    is_fp32: Annotated[bool, Field(exclude=True)] = False


class Parity(BaseModel):
    """How far the losses of a strong study's runs differ, step by step."""

    checked: bool = False
    """Whether losses must agree, as they must in fp32 only."""
    steps: int = 0
    """Steps compared with the run with the fewest ranks, over all runs."""
    largest: float = 0.0
    not_finite: int = 0
    """Steps among these whose loss is not finite in one run or in both."""
    broken: list[str] = []


def look(folder: Path, study: Study) -> tuple[list[Row], Parity]:
    """The current rows in order of ranks, and whether their losses agree."""
    slurm = Slurm()
    rows = [_row(folder.parent / member.run, member, slurm) for member in study.members]
    if study.kind == "sweep":
        return rows, Parity()
    rows.sort(key=lambda row: row.ranks)
    first = next((row for row in rows if row.tokens_per_s and row.ranks), None)
    for row in rows:
        if first and first.tokens_per_s and row.tokens_per_s:
            row.speedup = row.tokens_per_s / first.tokens_per_s
            row.efficiency = row.speedup * first.ranks / row.ranks
    return rows, _parity([row for row in rows if row.losses]) if study.kind == "strong" else Parity()


def _row(folder: Path, member: Member, slurm: Slurm) -> Row:
    run, row = Run(folder), Row.model_validate(member.model_dump())
    if is_run(folder):
        row.state = status.status(run, slurm).state
    elif member.job:
        row.state = status.QUEUED
    curve = effect.curve([attempt.paths for attempt in run.attempts])
    row.losses, row.step_s, row.tokens_per_s = curve.losses, curve.median_s, curve.tokens_per_s
    row.loss = next(reversed(curve.losses.values()), None)
    if run.last:
        row.is_fp32 = dig(run.last.plan, "recipe", "train", "precision") == "fp32"
        for event in metrics.tail(run.last.paths.metrics):
            if event.get("event") == "eval":
                row.eval_loss = metrics.number(event, "loss")
            elif event.get("event") == "end":
                row.seconds = metrics.number(event, "train_seconds")
    return row


def _parity(rows: Sequence[Row]) -> Parity:
    """Compare the losses of each run with those of the first."""
    found = Parity(checked=all(row.is_fp32 for row in rows))
    for row in rows[1:]:
        ours, theirs = rows[0].losses, row.losses
        apart = effect.compare(ours, theirs, PARITY)
        found.not_finite += sum(ours[step] is None or theirs[step] is None for step in {*ours} & {*theirs})
        found.steps += apart.steps
        found.largest = max(found.largest, apart.largest)
        if apart.first is not None and found.checked:
            a, b = effect.pair(apart.first_a, apart.first_b)
            far = effect.difference(apart.first_a, apart.first_b)
            found.broken.append(f"step {apart.first}: {a} on {rows[0].ranks}, {b} on {row.ranks}, {far:.1e} apart")
    return found
