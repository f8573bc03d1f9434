"""What `dray scale` and `dray sweep` share: start the runs of a study, and show them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from dray import process
from dray.cli import run as here
from dray.cli import study_table
from dray.cli.candidates import recipes
from dray.cli.options import program
from dray.config import checkout
from dray.config.recipe import Recipe
from dray.contract import exit_codes, files, run_folder
from dray.contract.findings import ConfigError, DrayError, counted
from dray.images import store
from dray.runs import allocation, arrays, login, source, state, submit, write
from dray.runs import study as studies
from dray.runs.arrays import Common, Size
from dray.runs.paths import default_runs, new_id
from dray.runs.study import Member, Row, Study

RecipeFile = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE]", help="A recipe file, or its name.", autocompletion=recipes),
]
Table = Annotated[
    str, typer.Option("--table", metavar="STUDY", help="Start nothing: show the runs of this study as they are now.")
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        "--at-most", metavar="M", min=1, help="With Slurm: at most so many tasks of an array at once; else as it can."
    ),
]
# After these no other run begins: it would be refused likewise, or the user or Slurm has stopped this one.
_LAST = (exit_codes.CONFIG, exit_codes.RETRY, *(128 + one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


class Wanted(NamedTuple):
    """One run of a study."""

    settings: Sequence[str]
    """What it has that the others have not."""
    size: Size
    ranks: int = 0
    """Of all its nodes, where that is what differs."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What both verbs start: jobs of Slurm's, or, without Slurm and inside a job, one after another here."""

    kind: Literal["strong", "weak", "sweep"]
    recipe: Path
    settings: Sequence[str]
    site: str
    runs: Path | None
    sbatch: Sequence[str]
    at_most: int | None

    def __call__(self, wanted: Sequence[Wanted]) -> None:
        """All of them; then what there is to see."""
        if len(wanted) > studies.MOST:
            raise ConfigError("a study has too many runs", wanted=f"at most {studies.MOST}", found=len(wanted))
        read = [write.read_recipe(self.recipe, [*self.settings, *one.settings]) for one in wanted]  # before one begins
        runs = (self.runs or default_runs()).absolute()
        folder = runs / new_id(f"{'sweep' if self.kind == 'sweep' else 'scale'}-{read[0].name}")
        members = [
            Member(run=f"{folder.name}-{number}", ranks=one.ranks, settings=list(one.settings))
            for number, one in enumerate(wanted, 1)
        ]
        own = [[*one.settings, *_apart(recipe, one)] for recipe, one in zip(read, members, strict=True)]
        study = Study(kind=self.kind, recipe=str(self.recipe.absolute()), members=members)
        if process.which("sbatch") and "SLURM_JOB_ID" not in os.environ:
            self._queue(folder, study, own, [one.size for one in wanted])
            return
        if self.sbatch or self.at_most:
            raise ConfigError(
                "no job is submitted, and one run follows another", where="this machine",
                found=f"inside job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else "no sbatch",
                fix=f"leave out {'--at-most' if self.at_most else '--sbatch'}, or type it on a login node",
            )  # fmt: skip
        here = Here(folder, study)
        code = 0
        for member, settings, one in zip(members, own, wanted, strict=True):
            code = here.add(member, [*self._options(one.size), f"--runs={runs}", *self._common(), *settings])
            if code in _LAST:
                break
        if not folder.exists():  # the first was refused
            raise typer.Exit(code)
        print()
        show(folder, code=code if code in _LAST else 0)

    def _common(self) -> list[str]:
        return [str(self.recipe.absolute()), *self.settings]

    def _options(self, size: Size) -> list[str]:
        given = {"--nodes": size.nodes, "--ranks": size.ranks, "--gpus-per-node": size.gpus, "--site": self.site}
        return [f"{option}={value}" for option, value in given.items() if value]

    def _queue(self, folder: Path, study: Study, own: Sequence[list[str]], sizes: Sequence[Size]) -> None:
        """Plan all of them, so that one that is refused leaves nothing; then submit them."""
        submit.check(self.sbatch)
        site = str(Path(self.site).absolute()) if self.site.endswith(".toml") else self.site
        known = login.known(site)
        common = Common(self.recipe.absolute(), self.settings, site, self.sbatch, known)
        jobs = [
            arrays.planned(common, number, folder.parent / member.run, settings, size)
            for number, (member, settings, size) in enumerate(zip(study.members, own, sizes, strict=True), 1)
        ]
        _report(jobs)
        found = arrays.groups(jobs, known.conf)
        code = source.look(self.recipe.absolute().parent)
        studies.save(folder, study)
        try:
            files.write_atomic(folder / run_folder.TASKS, arrays.tasks(jobs), mode=0o600)
            for group in found:
                study = _submitted(folder, study, group, arrays.command(group, folder, self.at_most or 0), code)
        except (DrayError, OSError):  # what is in the queue stays there
            studies.keep(folder, study, [one for one in study.members if one.job])
            if folder.exists():
                print("\n".join(_again(folder, study)))
            raise
        if self.at_most and len(found) > 1:
            print(f"--at-most holds for each array: {counted(len(found), 'job')} may run at once")
        print()
        show(folder)


def _submitted(
    folder: Path, study: Study, group: Sequence[arrays.Job], argv: Sequence[str], code: tuple[source.Source, str] | None
) -> Study:
    """The study, kept at once with the job of these: what has begun is in it, however this program ends."""
    jobs = dict(zip((job.run.name for job in group), arrays.submit(group, argv, code), strict=True))
    members = [
        one.model_copy(update={"job": jobs[one.run].job, "task": jobs[one.run].task}) if one.run in jobs else one
        for one in study.members
    ]
    for member in members:
        if member.run in jobs:
            print(f"job {member.job_id}: {_about(member.ranks, member.settings)}")
    return studies.keep(folder, study, members)


def _report(jobs: Sequence[arrays.Job]) -> None:
    """Once what is unwise in several; and the images, of which a large one is read whole."""
    told = {f"dray: {finding.level}: {finding}" for job in jobs for finding in job.plan.findings}
    for image in {(job.plan.recipe.image_name, job.plan.recipe.image_digest, job.plan.engine) for job in jobs}:
        store.required(checkout.root(), *image)
    print("".join(f"{line}\n" for line in sorted(told)), end="", file=sys.stderr)


class Here:
    """Starts the runs of a study on this machine."""

    def __init__(self, folder: Path, study: Study) -> None:
        self._folder, self._study = folder, study.model_copy(update={"members": []})

    def add(self, member: Member, argv: Sequence[str]) -> int:
        """One run; its exit code."""
        before = self._study.members
        self._study = studies.keep(self._folder, self._study, [*before, member])
        print(f"\n== {_about(member.ranks, member.settings)}", flush=True)
        code = exit_codes.CONFIG
        try:
            code = _run([f"--run={member.run}", *argv])
            return code
        finally:
            if code == exit_codes.CONFIG and not (self._folder.parent / member.run).exists():
                self._study = studies.keep(self._folder, self._study, before)  # it was refused: there is nothing of it


def _program() -> list[str]:
    return [sys.executable, "-m", "dray"] if sys.argv[0].endswith(".py") else program()


def _run(argv: Sequence[str]) -> int:
    """`dray run` in this process, so that Ctrl-C ends its ranks as always; what it says to type is a run's.

    Inside an salloc the batch script takes the place of the process of `dray run`, which must not be this one.
    """
    if allocation.found(os.environ):
        return process.in_front([*_program(), "run", *argv])
    before, sys.argv = sys.argv, [sys.argv[0], "run", *argv]
    try:
        app = typer.Typer()
        app.command()(here.run)
        return int(app(list(argv), obj=[], standalone_mode=False) or 0)
    finally:
        sys.argv = before


def _apart(recipe: Recipe, member: Member) -> list[str]:
    """No run of a study goes on from another's checkpoints."""
    named = {"folder": recipe.checkpoint.folder, "mirror": recipe.checkpoint.mirror}
    return [f"checkpoint.{key}={place.rstrip('/')}/{member.run}" for key, place in named.items() if place]


def show_asked(table: str, runs: Path | None, *, as_json: bool) -> None:
    """With --table; runs that are started print as they go, and their table is no JSON."""
    if table:
        show(folder_of(table, runs), as_json=as_json)
    if as_json:
        raise ConfigError("--json is for --table", fix="leave it out; then --table STUDY --json shows the runs")


def show(folder: Path, *, as_json: bool = False, code: int = 0) -> None:
    """The table; 1 where a run has failed, or losses differ that should not."""
    study = studies.load(folder)
    rows, parity = studies.look(folder, study)
    failed = any(row.state in (state.FAILED, state.STOPPED, state.LOST) for row in rows)
    if as_json:
        found = {"study": str(folder), "kind": study.kind, "runs": [row.model_dump() for row in rows]}
        print(json.dumps(found | {"parity": parity.model_dump()}, indent=1))
    else:
        print(
            "\n".join(
                [*study_table.table(study, rows), *study_table.parity(study, parity), *_more(folder, study, rows)]
            )
        )
    raise typer.Exit(code or int(failed or bool(parity.broken)))


def folder_of(named: str, runs: Path | None) -> Path:
    """Of the study that --table names."""
    return studies.find(named, (runs or default_runs()).absolute())


def _more(folder: Path, study: Study, rows: Sequence[Row]) -> list[str]:
    open_ = sum(row.state in (state.QUEUED, state.RUNNING, state.NO_RESULT, "no run") for row in rows)
    return _again(folder, study, f"{counted(open_, 'run')} of {len(rows)} not ended; " if open_ else "")


def _again(folder: Path, study: Study, left: str = "") -> list[str]:
    return ["", f"{left}again: dray {'sweep' if study.kind == 'sweep' else 'scale'} --table {folder}"]


def _about(ranks: int, settings: Sequence[str]) -> str:
    return " ".join([*([counted(ranks, "rank")] if ranks else []), *settings])
