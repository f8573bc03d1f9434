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
from dray.cli import study_table
from dray.cli.candidates import recipes
from dray.cli.options import program
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.contract import exit_codes, files, run_folder
from dray.contract.findings import ConfigError, DrayError, counted
from dray.images import store
from dray.runs import arrays, login, source, status, submit, write
from dray.runs import study as studies
from dray.runs.arrays import Common, Size
from dray.runs.store import default_runs, new_id
from dray.runs.study import Member, Row, Study

RecipeFile = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE]", help="A recipe file, or its name.", autocompletion=recipes),
]
Table = Annotated[
    str, typer.Option("--table", metavar="STUDY", help="Show the runs of this study as they are now; start nothing.")
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        "--at-most", metavar="M", min=1, help="With Slurm: run at most this many tasks of a job array at once."
    ),
]
# After these codes no other run begins: it would be refused too, or the user or Slurm has stopped the study.
_LAST = (exit_codes.CONFIG, exit_codes.RETRY, *(128 + one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


class Wanted(NamedTuple):
    """One run of a study."""

    settings: Sequence[str]
    """The settings that only this run has."""
    size: Size
    ranks: int = 0
    """The ranks of all its nodes, if the runs differ in them."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Starts the runs of a study: as Slurm jobs, or, without Slurm or inside a job, one after another here."""

    kind: Literal["strong", "weak", "sweep"]
    recipe: Path
    settings: Sequence[str]
    site: str
    runs: Path | None
    sbatch: Sequence[str]
    at_most: int | None

    def __call__(self, wanted: Sequence[Wanted]) -> None:
        """Start all runs, then show the table."""
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
                "--sbatch and --at-most are for jobs, but here dray submits none", where="this machine",
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
        """Plan all runs before submitting any, so that a refused one leaves nothing."""
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
        except (DrayError, OSError):
            # Of refused jobs no folder is left. All others may be in the queue, whatever sbatch printed.
            studies.keep(folder, study, [one for one in study.members if (folder.parent / one.run).exists()])
            if folder.exists():
                print("\n".join(_again(folder, study)))
            raise
        if self.at_most and len(found) > 1:
            print(f"--at-most holds for each of the {counted(len(found), 'job array')}")
        print()
        show(folder)


def _submitted(
    folder: Path, study: Study, group: Sequence[arrays.Job], argv: Sequence[str], code: tuple[source.Source, str] | None
) -> Study:
    """Submit a group and save its job numbers in the study at once, in case this program is killed."""
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
    """Print each warning once; verify each image once, since that reads it all."""
    told = {f"dray: {finding.level}: {finding}" for job in jobs for finding in job.plan.findings}
    for image in {(job.plan.recipe.image_name, job.plan.recipe.image_digest, job.plan.engine) for job in jobs}:
        store.required(dray_home.root(), *image)
    print("".join(f"{line}\n" for line in sorted(told)), end="", file=sys.stderr)


class Here:
    """Starts the runs of a study on this machine."""

    def __init__(self, folder: Path, study: Study) -> None:
        self._folder, self._study = folder, study.model_copy(update={"members": []})

    def add(self, member: Member, argv: Sequence[str]) -> int:
        """Start one run; return its exit code."""
        before = self._study.members
        self._study = studies.keep(self._folder, self._study, [*before, member])
        print(f"\n== {_about(member.ranks, member.settings)}", flush=True)
        code = exit_codes.CONFIG
        try:
            code = _run([f"--run={member.run}", *argv])
            return code
        finally:
            if code == exit_codes.CONFIG and not (self._folder.parent / member.run).exists():
                self._study = studies.keep(self._folder, self._study, before)  # it was refused, and left nothing


def _run(argv: Sequence[str]) -> int:
    """`dray run` as the user would type it."""
    return process.in_front([*program(), "run", *argv])


def _apart(recipe: Recipe, member: Member) -> list[str]:
    """Settings that give the run checkpoint folders of its own: it must not resume from another run's."""
    named = {"folder": recipe.checkpoint.folder, "mirror": recipe.checkpoint.mirror}
    return [f"checkpoint.{key}={place.rstrip('/')}/{member.run}" for key, place in named.items() if place]


def show_asked(table: str, runs: Path | None, *, as_json: bool) -> None:
    """With --table, show that study and exit. Refuse --json without it: runs that start print their progress."""
    if table:
        show(folder_of(table, runs), as_json=as_json)
    if as_json:
        raise ConfigError("--json needs --table", fix="leave out --json; later, --table STUDY --json prints the runs")


def show(folder: Path, *, as_json: bool = False, code: int = 0) -> None:
    """Print the table; exit with 1 if a run failed, or if losses differ that should be equal."""
    study = studies.load(folder)
    rows, parity = studies.look(folder, study)
    failed = any(row.state in (status.FAILED, status.STOPPED, status.LOST) for row in rows)
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
    """The folder of the study that --table names."""
    return studies.find(named, (runs or default_runs()).absolute())


def _more(folder: Path, study: Study, rows: Sequence[Row]) -> list[str]:
    open_ = sum(row.state in (status.QUEUED, status.RUNNING, status.NO_RESULT, "no run") for row in rows)
    return _again(folder, study, f"{counted(open_, 'run')} of {len(rows)} not ended; " if open_ else "")


def _again(folder: Path, study: Study, left: str = "") -> list[str]:
    return ["", f"{left}again: dray {'sweep' if study.kind == 'sweep' else 'scale'} --table {folder}"]


def _about(ranks: int, settings: Sequence[str]) -> str:
    return " ".join([*([counted(ranks, "rank")] if ranks else []), *settings])
