"""A study: several runs of one recipe that differ in ranks or settings, and their table."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError, DrayError, listed
from dray.runs import effect, status, store, write
from dray.runs.metrics import Event, Metrics, number, whole
from dray.runs.slurm import Slurm
from dray.runs.store import RunPaths, attempts, is_run, make_run_folder

PARITY = 1e-4
"""The largest relative loss difference that fp32 sums in another order can cause."""
MOST = 256
"""The most runs in a study."""


class Member(BaseModel):
    """One run of a study."""

    model_config = ConfigDict(frozen=True)

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]
    """The name of its folder, beside the study's folder."""
    ranks: Annotated[int, Field(ge=0, le=10**9)] = 0
    settings: Annotated[list[Annotated[str, Field(max_length=1 << 16)]], Field(max_length=MOST)] = []
    """The settings of this run alone."""
    job: Annotated[int, Field(ge=1, lt=10**18)] | None = None
    task: Annotated[int, Field(ge=0, lt=10**18)] | None = None
    """The task number, if the job is an array."""

    @property
    def job_id(self) -> str | None:
        """The id for Slurm's commands: 12, or 12_3."""
        task = "" if self.task is None else f"_{self.task}"
        return f"{self.job}{task}" if self.job else None


class Study(BaseModel):
    """The content of study.json."""

    model_config = ConfigDict(frozen=True)

    version: int = 1
    kind: Literal["strong", "weak", "sweep"]
    """strong: the same global batch on any number of ranks; weak: the same batch per rank; sweep: other settings."""
    recipe: str
    members: Annotated[list[Member], Field(max_length=MOST)] = []


class Row(BaseModel):
    """The figures of one run so far."""

    run: str
    ranks: int
    settings: list[str]
    state: str
    """The state as in `dray status`; `no run` if it never started."""
    job_id: str | None = None
    """The id for Slurm's commands: 12, or 12_3."""
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


class Parity(BaseModel):
    """How far the losses of a strong study's runs differ, step by step."""

    checked: bool
    """Whether losses must agree, as they must in fp32 only."""
    steps: int = 0
    """Steps compared with the run with the fewest ranks, over all runs."""
    largest: float = 0.0
    not_finite: int = 0
    """Steps among these whose loss is not finite in one run or in both."""
    broken: list[str] = []


def save(folder: Path, study: Study) -> None:
    """Write study.json; the first time make its folder."""
    if not folder.is_dir():
        make_run_folder(folder)
    files.write_atomic(folder / run_folder.STUDY, study.model_dump_json(indent=1) + "\n")


def keep(folder: Path, study: Study, members: Sequence[Member]) -> Study:
    """Save the study with these members; without members, remove it."""
    study = study.model_copy(update={"members": list(members)})
    if members:
        save(folder, study)
    else:
        for name in (run_folder.STUDY, run_folder.TASKS):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    return study


def load(folder: Path) -> Study:
    """The study in a folder."""
    fix = f"name a folder with {run_folder.STUDY} in it: dray scale --table STUDY"
    return store.load(Study, folder / run_folder.STUDY, "study", fix=fix)


def find(named: str, runs: Path, file: str = run_folder.STUDY) -> Path:
    """The study's folder, by its path, its name or the beginning of it; `file` marks such a folder."""
    folder = Path(named).absolute()
    if "/" in named or os.path.lexists(folder / file):
        return folder
    names = sorted(path.parent.name for path in runs.glob(f"*/{file}"))
    fitting = [name for name in names if name == named] or [name for name in names if name.startswith(named)]
    if len(fitting) != 1:
        raise ConfigError(
            "several studies begin with this name" if fitting else "there is no such study",
            where=runs, found=ascii(named), wanted=listed((fitting or names)[::-1]),
            fix="--runs=FOLDER names another folder",
        )  # fmt: skip
    return runs / fitting[0]


def look(folder: Path, study: Study) -> tuple[list[Row], Parity]:
    """The current rows in order of ranks, and whether their losses agree."""
    members = study.members if study.kind == "sweep" else sorted(study.members, key=lambda one: one.ranks)
    rows, losses, queue = [], {}, Slurm()
    for member in members:
        row, losses[member.run] = _row(folder.parent / member.run, member, queue)
        rows.append(row)
    if study.kind != "sweep":
        _compare(rows)
    fp32 = study.kind == "strong" and all(_fp32(folder.parent / row.run) for row in rows if losses[row.run])
    return rows, _parity(rows, losses, checked=fp32) if study.kind == "strong" else Parity(checked=False)


def _row(run: Path, member: Member, queue: Slurm) -> tuple[Row, effect.Losses]:
    """The row of one run, and its losses by step."""
    row = Row(run=member.run, ranks=member.ranks, settings=member.settings, state="no run", job_id=member.job_id)
    losses: dict[int, float | None] = {}
    lines: list[Event] = []
    for attempt in attempts(run):
        paths = RunPaths(run, attempt)
        lines = []
        with suppress(OSError):
            for event in Metrics(paths.metrics):
                kind = event.get("event")
                if kind == "step" and (step := whole(event, "step")) and "loss" in event:
                    row.loss = losses[step] = number(event, "loss")
                    lines.append(event)
                elif kind == "eval":
                    row.eval_loss = number(event, "loss")
                elif kind == "end":
                    row.seconds = number(event, "train_seconds")
    if is_run(run):
        row.state = status.status(run, queue).state
    elif member.job:
        row.state = status.QUEUED
    row.step_s, row.tokens_per_s = (_median(lines, name) for name in ("step_s", "tokens_per_s"))
    return row, losses


def _median(lines: list[Event], name: str) -> float | None:
    found = [value for line in lines[1:] or lines if (value := number(line, name)) is not None]
    return statistics.median(found) if found else None


def _compare(rows: list[Row]) -> None:
    """Set speed-up and efficiency, relative to the run with the fewest ranks."""
    first = next((row for row in rows if row.tokens_per_s and row.ranks), None)
    for row in rows:
        if first and first.tokens_per_s and row.tokens_per_s and row.ranks:
            row.speedup = row.tokens_per_s / first.tokens_per_s
            row.efficiency = row.speedup * first.ranks / row.ranks


def _parity(rows: list[Row], losses: dict[str, effect.Losses], *, checked: bool) -> Parity:
    found = Parity(checked=checked)
    with_losses = [row for row in rows if losses[row.run]]
    for first, row in ((with_losses[0], other) for other in with_losses[1:]):
        ours, theirs = losses[first.run], losses[row.run]
        parting = effect.compare(ours, theirs, PARITY)
        found.not_finite += sum(ours[step] is None or theirs[step] is None for step in {*ours} & {*theirs})
        found.steps += parting.steps
        found.largest = max(found.largest, parting.largest)
        if parting.first is not None and checked:
            a, b = effect.pair(parting.first_a, parting.first_b)
            far = effect.difference(parting.first_a, parting.first_b)
            found.broken.append(f"step {parting.first}: {a} on {first.ranks}, {b} on {row.ranks}, {far:.1e} apart")
    return found


def _fp32(run: Path) -> bool:
    with suppress(DrayError, OSError):
        train = write.read(RunPaths(run, attempts(run)[-1])).recipe.train
        return bool(train and train.precision == "fp32")
    return False
