"""`dray replay`: repeat a run from its capsule."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import typer

from dray import process
from dray.cli.chosen import report
from dray.cli.options import Run, Runs, Sbatch
from dray.cli.run import conduct
from dray.config.recipe import Recipe
from dray.contract import exit_codes
from dray.contract.files import write_new
from dray.contract.findings import ConfigError
from dray.planning.schema import Plan
from dray.runs import capsule, compared, effect, local, pack, resubmit, trust, verify, write
from dray.runs import replay as replays
from dray.runs.capsule_schema import Capsule
from dray.runs.diff import Difference
from dray.runs.result import result_of
from dray.runs.store import RunPaths, default_runs, find, newest_attempt

_SHOWN = 20
_AHEAD = "nothing differs from the run, as far as dray can tell before the start"

_QUEUED = "nothing differs from the run, as far as dray can tell before Slurm chooses the nodes"


class _Before(NamedTuple):
    """The run to repeat."""

    word: str
    """Its folder, or its packed capsule."""
    paths: RunPaths
    attempts: list[RunPaths]
    plan: Plan
    made: Capsule
    recipe: Recipe

    def differences(self, paths: RunPaths, plan: Plan, *, ended: bool) -> list[Difference]:
        """What differs in the replay."""
        found = replays.differences((self.plan, self.made), paths, plan, ended=ended)
        return [*replays.worlds(self.attempts, plan), *found]


def replay(
    run: Run = "",
    engine: Annotated[
        str,
        typer.Option(metavar="[bare|docker|podman]", help="Container engine on this machine. Default: the run's own."),
    ] = "",
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the run's recipe with all decided values, to submit it; start nothing."
        ),
    ] = None,
    compare: Annotated[
        str, typer.Option(metavar="FOLDER", help="Compare with a replay that has ended; start nothing.")
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="For a run of Slurm: wait until the job ends, then compare.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="For a run of Slurm: submit it without asking.")] = False,
    sbatch: Sbatch = None,
    runs: Runs = None,
) -> None:
    """Repeat a run from its capsule, and compare the losses step by step.

    It lists what will differ. The exit code is 0 if all losses are equal to the last bit, else 1.
    A run of Slurm is submitted again. Of another user's run, or of a packed capsule, --recipe writes the recipe.

    dray replay 20261120-124439
    dray replay capsule.tar.gz --recipe again.toml
    """
    queues = {"--wait": wait, "--yes": yes, "--sbatch": bool(sbatch)}
    _one_of({"--compare": bool(compare), "--recipe": bool(recipe), "--engine": bool(engine)}, queues)
    with pack.opened(run, runs) as folder:
        newest = newest_attempt(folder)
        plan = write.read(newest)
        made = capsule.of(newest, plan)
        settings = replays.recipe_of(plan, made)
        before = _Before(str(find(run, runs)), newest, compared.of_run(folder, newest), plan, made, settings)
        if compare:
            _compare(before, compare, runs)
        if made.files and (changed := [one.path for one in verify.verify(newest).files if one.state != "same"]):
            print(f"changed since the run: {', '.join(changed[:_SHOWN])}", flush=True)
        if recipe:
            _save(recipe, settings, len(plan.world.nodes))
            return
        _require_own(find(run, runs), newest)
        if plan.by_slurm and not engine and process.which("sbatch"):
            _submit(before, (runs or default_runs()).absolute(), sbatch or [], yes=yes, wait=wait)
            return
        engine = replays.require_here(plan, engine)
        _one_of({"a run of this machine": True}, queues)
        local.require(settings, lambda *more: shlex.join(["dray", "replay", run, *more]), fixed=True)
        gpus = plan.world.ranks_per_node if plan.variant != "cpu" else 0
        facts = local.facts(
            settings, engine=engine, image=local.image_of(engine, settings), nodes=len(plan.world.nodes),
            gpus_per_node=gpus, site="" if plan.by_slurm else made.site,
        )  # fmt: skip
        again, paths = write.write(settings, facts, runs=(runs or default_runs()).absolute())
        known = before.differences(paths, again, ended=False)
        _list(known, _AHEAD, "what cannot be the same:")
        result = conduct(again, paths, again=shlex.join(["dray", "replay", run or newest.run.name]))
        _judge(before, [paths], again, known, result.exit_code)


def _require_own(named: Path, newest: RunPaths) -> None:
    """Refuse to start another user's run, or a packed one: its recipe names code that this user has not read."""
    found = f"{named}, a packed capsule" if named.is_file() else trust.foreign(newest)
    if found:
        word = shlex.quote(str(named))
        raise ConfigError(
            "dray replays only your own runs", wanted="a run folder that only you may write", found=found,
            fix=f"dray replay {word} --recipe again.toml; read it; then dray submit again.toml",
        )  # fmt: skip


def _one_of(wholly: dict[str, bool], queues: dict[str, bool]) -> None:
    """Refuse options that exclude each other; the options of a job exclude all others."""
    given = [name for name, is_given in wholly.items() if is_given]
    given += [name for name, is_given in queues.items() if is_given][:1] if given else []
    if len(given) > 1:
        raise ConfigError(
            f"{given[1]} does not go with {given[0]}",
            wanted="one of --compare, --recipe and --engine; or, if the run is submitted, --wait, --yes and --sbatch",
            found=" and ".join(given),
            fix=f"leave out {given[1]}",
        )


def _submit(before: _Before, runs: Path, more: Sequence[str], *, yes: bool, wait: bool) -> None:
    """Submit a job with the same nodes, ranks and options, after the user has agreed."""
    asked = resubmit.asked(before.paths.run)
    job = resubmit.job(before.recipe, before.plan, asked, runs, more)
    report(job.plan)
    found = before.differences(
        RunPaths(job.folder),
        job.plan,
        ended=False,
    )
    _list(resubmit.decided(found), _QUEUED, "what cannot be the same:")
    if asked is None:
        print("sbatch options: only the site's; the run folder has none of yours (--sbatch=--time=08:00:00 adds one)")
    print(shlex.join(job.argv), flush=True)
    if not yes and not _agreed():
        print("nothing was submitted")
        raise typer.Exit(exit_codes.FAILED)
    number = resubmit.start(job)
    later = shlex.join(["dray", "replay", before.word, "--compare", str(job.folder)])
    try:
        print(f"job {number} is in the queue\nrun folder: {job.folder}", flush=True)
        if not wait:
            print(f"once it has ended: {later}")
            return
        resubmit.wait(job.folder)
    except KeyboardInterrupt:
        print(f"\nthe job goes on; once it has ended: {later}", flush=True)
        raise typer.Exit(130) from None
    _compare(before, str(job.folder), None)


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "confirmation needs a terminal", found="standard input is not a terminal", fix="add --yes, or --recipe"
        )
    return typer.confirm("submit it?")


def _compare(before: _Before, word: str, runs: Path | None) -> NoReturn:
    """Compare with a replay that exists."""
    with pack.opened(word, runs) as folder:
        resubmit.require_ended(folder)
        paths = newest_attempt(folder)
        if paths.run.resolve() == before.paths.run.resolve():
            raise ConfigError(
                "a run cannot be compared with itself",
                where="--compare",
                found=word,
                fix="--compare FOLDER, of its replay",
            )
        result = result_of(paths)
        if result is None or result.exit_code:
            end = f"has {result.status}, with exit code {result.exit_code}" if result else "wrote no result"
            print(f"the replay {end}: {shlex.join(['dray', 'why', str(paths.run)])}")
        after = compared.of_run(folder, paths)
        _judge(before, after, write.read(paths), [], result.exit_code if result else exit_codes.DONE)


def _judge(before: _Before, after: list[RunPaths], plan: Plan, known: list[Difference], code: int) -> NoReturn:
    """Print what else differs, and whether the losses are the same; `known` was printed before."""
    found = before.differences(after[-1], plan, ended=True)
    _list([one for one in found if one not in known], "", f"what {'else ' * bool(known)}differs:")
    parting = effect.effect(before.attempts, after).parting
    if not before.recipe.train:
        print("dray does not know the losses of a command: compare what it printed")
        raise typer.Exit(code)
    print("\n".join(effect.losses_text(parting, "the run", "the replay")))
    if parting.first is not None and parting.first_a is None and parting.first_b is None:
        print("not finite in both runs: they cannot be compared")
    elif not replays.same(parting):
        why = replays.breaks(found, before.recipe, before.made)
        print(f"not promised: {why[0]}" if why else "they should be identical: nothing that decides them differs")
    raise typer.Exit(code or (exit_codes.DONE if replays.same(parting) else exit_codes.FAILED))


def _list(found: Iterable[Difference], none: str, head: str) -> None:
    lines = [f"  {one.kind}: {one.name}: {one.a} -> {one.b}" for one in found]
    more = [f"  and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
    if lines or none:
        print("\n".join([head, *lines[:_SHOWN], *more] if lines else [none]), flush=True)


def _save(file: Path, recipe: Recipe, nodes: int) -> None:
    if file.suffix != ".toml":
        raise ConfigError("a recipe is a .toml file", where="--recipe", found=str(file), fix=f"--recipe {file}.toml")
    for name, text in replays.as_files(recipe, file.stem).items():
        path = file.with_name(name)
        try:
            write_new(path, text)
        except OSError as error:
            wanted = "a FILE that does not exist yet"
            raise ConfigError(
                "the recipe cannot be written", where=path, wanted=wanted, found=error.strerror
            ) from error
    if code := trust.code_keys(recipe):
        print(f"keys that run code: {', '.join(code)}")
    print(f"{file}: dray submit {shlex.quote(str(file))} --nodes {nodes}, and then: dray diff RUN NEW_RUN")
