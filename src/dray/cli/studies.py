"""What `dray scale` and `dray sweep` share: start the runs of a study, and show them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dray import process
from dray.cli import run as here
from dray.cli.options import program
from dray.config.recipe import Recipe
from dray.contract import exit_codes
from dray.contract.findings import counted
from dray.contract.values import printable
from dray.runs import allocation
from dray.runs import study as studies
from dray.runs.paths import default_runs
from dray.runs.study import Member, Parity, Row, Study

Table = Annotated[
    str, typer.Option("--table", metavar="STUDY", help="Start nothing: show the runs of this study as they are now.")
]
_BAR = 20
# After these no other run begins: it would be refused likewise, or the user or Slurm has stopped this one.
_LAST = (exit_codes.CONFIG, exit_codes.RETRY, *(128 + one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


class Start:
    """Starts the runs of a study: jobs of Slurm's, or, without Slurm and inside a job, one after another here."""

    def __init__(self, folder: Path, study: Study) -> None:
        self._folder, self._study = folder, study
        self._queues = bool(process.which("sbatch")) and "SLURM_JOB_ID" not in os.environ

    def add(self, member: Member, options: Sequence[str], common: Sequence[str]) -> int:
        """One run; its exit code."""
        argv = [*options, f"--runs={self._folder.parent}", *common]
        if self._queues:
            done = process.run([*_program(), "submit", "--json", *argv], check=False)
            print(done.err, end="", file=sys.stderr)
            if done.code:
                return done.code
            queued = json.loads(done.out)
            member = member.model_copy(update={"run": Path(queued["run"]).name, "job": queued["job"]})
            print(f"job {member.job}: {_about(member.ranks, member.settings)}")
            self._keep(member)
            return 0
        self._keep(member)
        print(f"\n== {_about(member.ranks, member.settings)}", flush=True)
        code = exit_codes.CONFIG
        try:
            code = _run([f"--run={member.run}", *argv])
            return code
        finally:
            if code == exit_codes.CONFIG and not (self._folder.parent / member.run).exists():
                self._forget(member)

    def _keep(self, member: Member) -> None:
        """At once: what has begun is in the study, however this program ends."""
        self._study = self._study.model_copy(update={"members": [*self._study.members, member]})
        studies.save(self._folder, self._study)

    def _forget(self, member: Member) -> None:
        """It was refused, so there is nothing of it; without a run there is no study."""
        rest = [one for one in self._study.members if one != member]
        self._study = self._study.model_copy(update={"members": rest})
        if rest:
            studies.save(self._folder, self._study)
        else:
            studies.remove(self._folder)


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


def start(
    folder: Path, study: Study, recipe: Recipe, planned: Sequence[tuple[Member, Sequence[str]]], common: Sequence[str]
) -> None:
    """All of them, up to the first that cannot begin or is stopped; then what there is to see."""
    starts = Start(folder, study)
    code = 0
    for member, options in planned:
        code = starts.add(member, options, [*common, *member.settings, *_apart(recipe, member)])
        if code in _LAST:
            break
    if not folder.exists():  # the first was refused
        raise typer.Exit(code)
    print()
    show(folder, code=code if code in _LAST else 0)


def _apart(recipe: Recipe, member: Member) -> list[str]:
    """No run of a study goes on from another's checkpoints."""
    named = {"folder": recipe.checkpoint.folder, "mirror": recipe.checkpoint.mirror}
    return [f"checkpoint.{key}={place.rstrip('/')}/{member.run}" for key, place in named.items() if place]


def show(folder: Path, *, as_json: bool = False, code: int = 0) -> None:
    """The table; 1 where a run has failed, or losses differ that should not."""
    study = studies.load(folder)
    rows, parity = studies.look(folder, study)
    failed = any(row.state in ("failed", "stopped") for row in rows)
    if as_json:
        found = {"study": str(folder), "kind": study.kind, "runs": [row.model_dump() for row in rows]}
        print(json.dumps(found | {"parity": parity.model_dump()}, indent=1))
    else:
        print("\n".join([*_table(study, rows), *_parity(study, parity), *_more(folder, study, rows)]))
    raise typer.Exit(code or int(failed or bool(parity.broken)))


def folder_of(named: str, runs: Path | None) -> Path:
    """Of the study that --table names."""
    return studies.find(named, (runs or default_runs()).absolute())


def _table(study: Study, rows: Sequence[Row]) -> list[str]:
    scaling = study.kind != "sweep"
    titles = ["ranks" if scaling else "settings", "state", "tokens/s", *(["speedup", "efficiency"] * scaling)]
    titles += ["step s", "train s", "loss", "eval loss", "run"]
    lines = [titles]
    for row in rows:
        own = [_figure(row.speedup, ".2f"), _figure(row.efficiency, ".0%")] if scaling else []
        lines.append(
            [
                str(row.ranks) if scaling else printable(" ".join(row.settings)),
                row.state, _figure(row.tokens_per_s, ",.0f"), *own, _figure(row.step_s, ".3f"),
                _figure(row.seconds, ",.1f"), _figure(row.loss, ".5f"), _figure(row.eval_loss, ".5f"), row.run,
            ]
        )  # fmt: skip
    left = {"settings", "state", "run"}
    return columns(lines, [title in left for title in titles]) + (_plot(rows) if scaling else [])


def columns(lines: Sequence[Sequence[str]], left: Sequence[bool]) -> list[str]:
    """A table as text; `left` says which of its columns are aligned there."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [
            one.ljust(width) if is_left else one.rjust(width)
            for one, width, is_left in zip(line, widths, left, strict=True)
        ]
        for line in lines
    ]
    return ["  ".join(line).rstrip() for line in aligned]


def _plot(rows: Sequence[Row]) -> list[str]:
    """Efficiency by ranks, as bars; a full one is 100 %."""
    drawn = [(row.ranks, row.efficiency) for row in rows if row.efficiency is not None]
    width = max((len(str(ranks)) for ranks, _ in drawn), default=0)
    bars = [f"{ranks:>{width}} {'#' * round(min(share, 1.5) * _BAR):<{_BAR}}| {share:.0%}" for ranks, share in drawn]
    return ["", "efficiency", *bars] if len(bars) > 1 else []


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _parity(study: Study, parity: Parity) -> list[str]:
    if study.kind != "strong":
        return []
    if parity.broken:
        wanted = f"wanted: at most {studies.PARITY:.0e}, the recipe is fp32 and the global batch is the same"
        return ["", "LOSS PARITY IS BROKEN", *(f"  {line}" for line in parity.broken), f"  {wanted}"]
    note = "they agree" if parity.checked else "not checked: not fp32"
    return ["", f"losses: {parity.largest:.1e} apart at most, step by step; {note}"]


def _more(folder: Path, study: Study, rows: Sequence[Row]) -> list[str]:
    verb = "sweep" if study.kind == "sweep" else "scale"
    open_ = sum(row.state in ("queued", "running", "no run") for row in rows)
    left = f"{counted(open_, 'run')} of {len(rows)} not ended; " if open_ else ""
    return ["", f"{left}again: dray {verb} --table {folder}"]


def _about(ranks: int, settings: Sequence[str]) -> str:
    return " ".join([*([counted(ranks, "rank")] if ranks else []), *settings])
