"""`dray replay`: repeat a run from its capsule, or hand the capsule on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dray import process
from dray.cli.args import Run, Runs, Sbatch, refuse_or_warn
from dray.cli.run import conduct
from dray.cli.top import watch
from dray.contract import exit_codes
from dray.contract.control_characters import printable
from dray.contract.files import write_new
from dray.contract.findings import ConfigError, counted
from dray.planning.schema import Plan
from dray.runs import archive, capsule, local, prepare, trust
from dray.runs import compare as comparing
from dray.runs import replay as replays
from dray.runs.replay import Original
from dray.runs.result import result_of
from dray.runs.store import RunPaths, default_runs, find, last_attempt, plan_of


def replay(
    run: Run = "",
    engine: Annotated[
        str,
        typer.Option(metavar="[bare|docker|podman]", help="Container engine on this machine. Default: the run's own."),
    ] = "",
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the run's recipe with all decided values; start nothing."),
    ] = None,
    compare: Annotated[
        str, typer.Option(metavar="FOLDER", help="Compare with a replay that has ended; start nothing.")
    ] = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="Check each file that the capsule records; exit code 1 if one differs.")
    ] = False,
    pack: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Pack the capsule as FILE (tar.gz) for others, without secrets."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="For a run of Slurm: watch the job until it ends, then compare.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="For a run of Slurm: submit it without asking.")] = False,
    sbatch: Sbatch = None,
    runs: Runs = None,
) -> None:
    """Repeat a run from its capsule, and compare the losses step by step.

    It lists what will differ. The exit code is 0 if all losses are equal to the last bit, else 1.
    A run of Slurm is submitted again. Of another user's run, --recipe writes the recipe.

    dray replay 20261120-124439
    dray replay 4711 --recipe again.toml
    """
    given = {"--compare": compare, "--recipe": recipe, "--engine": engine, "--verify": verify, "--pack": pack}
    named = [name for name, value in given.items() if value]
    if named and (yes or follow or sbatch):
        named.append("an option of a job")
    if len(named) > 1:
        wanted = f"one of {', '.join(given)}; or, for a job, --follow, --yes and --sbatch"
        raise ConfigError(f"{named[1]} does not go with {named[0]}", wanted=wanted, fix=f"leave out {named[0]}")
    folder = find(run, runs)
    if verify:
        _verify(last_attempt(folder))
    if pack:
        print(archive.text(archive.make(last_attempt(folder).run, pack)))
        return
    before = replays.original(folder)
    if compare:
        _compare(before, find(compare, runs))
    if changed := [file.path for file in capsule.verify(before.paths) if file.state != "same"]:
        print(f"changed since the run: {', '.join(changed)}", flush=True)
    if recipe:
        _save(recipe, before)
        return
    replays.require_own(before)
    runs = (runs or default_runs()).absolute()
    if before.plan.by_slurm and not engine and process.which("sbatch"):
        _submit(before, runs, sbatch or [], yes=yes, follow=follow)
    else:
        _start(before, runs, replays.engine_here(before.plan, engine))


def _verify(paths: RunPaths) -> NoReturn:
    found = capsule.verify(paths)
    changed = [f"{file.state:<8} {file.path}" for file in found if file.state != "same"]
    same = f"{len(found) - len(changed)} of {counted(len(found), 'file')} as the capsule recorded them"
    print("\n".join([*printable(changed), same]))
    raise typer.Exit(exit_codes.FAILED if changed else exit_codes.DONE)


def _save(file: Path, before: Original) -> None:
    for name, text in replays.as_files(before.recipe, file.stem).items():
        try:
            write_new(file.with_name(name), text)
        except OSError as error:
            raise ConfigError(
                "the recipe cannot be written", where=file.with_name(name), wanted="a FILE that does not exist yet",
                found=error.strerror,
            ) from error  # fmt: skip
    if code := trust.code_keys(before.recipe):
        print(f"keys that run code: {', '.join(code)}")
    nodes = before.recipe.nodes
    print(f"dray submit {shlex.quote(str(file.with_suffix('.toml')))} --nodes {nodes}, and then: dray diff RUN NEW_RUN")


def _start(before: Original, runs: Path, engine: str) -> NoReturn:
    """Repeat the run on this machine."""
    recipe, plan = before.recipe, before.plan
    local.require(recipe)
    facts = local.facts(
        recipe, engine=engine, image=local.image_of(engine, recipe), nodes=recipe.nodes,
        gpus_per_node=replays.gpus_of(plan), site="" if plan.by_slurm else before.capsule.site,
    )  # fmt: skip
    made, paths = prepare.write(recipe, facts, runs=runs)
    _announce(before, paths, made)
    conduct(made, paths)
    _compare(before, paths.run)


def _submit(before: Original, runs: Path, options: Sequence[str], *, yes: bool, follow: bool) -> None:
    """Submit a job with the same nodes, ranks and options, after the user has agreed."""
    job = replays.job(before, runs, options)
    refuse_or_warn(job.plan)
    folder = Path(job.plan.run_folder)
    _announce(before, RunPaths(folder), job.plan)
    print(shlex.join(job.argv), flush=True)
    if not yes and not _agreed():
        print("nothing was submitted")
        raise typer.Exit(exit_codes.FAILED)
    number = replays.start(before, job)
    print(f"job {number} is in the queue\nrun folder: {folder}")
    later = shlex.join(["dray", "replay", str(before.folder), "--compare", str(folder)])
    print(f"once it has ended: {later}", flush=True)
    if follow:
        watch(folder)
        _compare(before, folder)


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "confirmation needs a terminal", found="standard input is not a terminal", fix="add --yes, or --recipe"
        )
    return typer.confirm("submit it?")


def _announce(before: Original, paths: RunPaths, plan: Plan) -> None:
    """Print what will differ, as far as this machine can tell."""
    found = before.differences(paths, plan, started=False)
    head = (
        "what cannot be the same:"
        if found
        else "nothing differs from the run, as far as dray can tell before the start"
    )
    print("\n".join([head, *map(comparing.line, found)]), flush=True)


def _compare(before: Original, folder: Path) -> NoReturn:
    """Print what differs in a replay that has ended, and whether the losses are the same."""
    replays.require_ended(folder)
    comparing.require_two(before.folder, folder)
    after = comparing.attempts_of(folder)
    result = result_of(after[-1])
    code = result.exit_code if result else exit_codes.FAILED
    if code:
        end = f"has {result.status}, with exit code {code}" if result else "wrote no result"
        print(f"the replay {end}: {shlex.join(['dray', 'why', str(folder)])}")
    differences = before.differences(after[-1], plan_of(after[-1]), started=True)
    if differences:
        print("\n".join(["what differs:", *map(comparing.line, differences)]))
    if not before.recipe.train:
        print("dray does not know the losses of a command: compare what it printed")
        raise typer.Exit(code)
    losses = comparing.compare(comparing.curve(before.attempts).losses, comparing.curve(after).losses)
    print("\n".join(comparing.losses_text(losses, "the run", "the replay")))
    if replays.same(losses):
        raise typer.Exit(code)
    if losses.first is not None and losses.first_a is None and losses.first_b is None:
        print("not finite in both runs: they cannot be compared")
    else:
        why = replays.breaks(differences, before)
        print(f"not promised: {why[0]}" if why else "they should be identical: nothing that decides them differs")
    raise typer.Exit(code or exit_codes.FAILED)
