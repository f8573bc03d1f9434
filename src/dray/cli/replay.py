"""`dray replay`: a run again, from its capsule."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.options import Run, Runs
from dray.cli.run import conduct
from dray.config.recipe import Recipe
from dray.contract import exit_codes
from dray.contract.files import write_new
from dray.contract.findings import ConfigError
from dray.contract.values import printable
from dray.runs import capsule, compared, effect, local, pack, verify, write
from dray.runs import replay as replays
from dray.runs.diff import Difference
from dray.runs.named import find
from dray.runs.paths import default_runs, newest_attempt

_SHOWN = 20


def replay(
    run: Run = "",
    engine: Annotated[
        str, typer.Option(metavar="[bare|docker|podman]", help="What starts the image here, in place of the run's own.")
    ] = "",
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the recipe as it was decided, to submit it again; start nothing."),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust-run", help="Run the code of a capsule that is not your own.")] = False,
    runs: Runs = None,
) -> None:
    """Run again what a capsule has, and compare the losses step by step. RUN may be a packed one.

    It lists what cannot be the same, and ends with 0 if all losses are equal to the last bit, else with 1.

    dray replay 20261120-124439
    """
    with pack.opened(run, runs) as folder:
        before = newest_attempt(folder)
        plan = write.read(before)
        made = capsule.of(before, plan)
        settings = replays.recipe_of(plan, made)
        if made.files and (changed := [one.path for one in verify.verify(before).files if one.state != "same"]):
            print(printable(f"not as recorded: {', '.join(changed[:_SHOWN])}"), flush=True)
        if not trust and (find(run, runs).is_file() or not replays.is_own(before.run)):
            replays.require_trust(settings, str(find(run, runs)))
        if recipe:
            _save(recipe, settings, len(plan.world.nodes))
            return
        engine = replays.require_here(plan, engine)
        local.require(settings, lambda *more: shlex.join(["dray", "replay", run, *more]))
        gpus = plan.world.ranks_per_node if plan.variant != "cpu" else 0
        facts = local.facts(
            settings, engine=engine, image=local.image_of(engine, settings), nodes=len(plan.world.nodes),
            gpus_per_node=gpus, site="" if plan.by_slurm else made.site,
        )  # fmt: skip
        again, paths = write.write(settings, facts, runs=(runs or default_runs()).absolute())
        attempts = compared.of_run(folder, before)
        known = [*replays.worlds(attempts, plan), *replays.differences((plan, made), paths, again, ended=False)]
        _list(known, "the same as in the run, as far as can be told before it starts", "what cannot be the same:")
        result = conduct(again, paths, again=shlex.join(["dray", "replay", run or before.run.name]))
        found = [*replays.worlds(attempts, plan), *replays.differences((plan, made), paths, again, ended=True)]
        _list([one for one in found if one not in known], "", "what is not the same besides:")
        parting = effect.effect(attempts, [paths]).parting
    if not settings.train:
        print("a command's own figures dray does not know: compare what it printed")
        raise typer.Exit(result.exit_code)
    print("\n".join(effect.losses_text(parting, "the run", "the replay")))
    if not replays.same(parting):
        why = replays.breaks(found, settings, made)
        print(
            f"not promised: {printable(why[0])}"
            if why
            else "they had to be identical: nothing that decides them differs"
        )
    raise typer.Exit(result.exit_code or (exit_codes.DONE if replays.same(parting) else exit_codes.FAILED))


def _list(found: Iterable[Difference], none: str, head: str) -> None:
    lines = [f"  {one.kind}: {one.name}: {one.a} -> {one.b}" for one in found]
    more = [f"  and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
    if lines or none:
        print(printable("\n".join([head, *lines[:_SHOWN], *more] if lines else [none])), flush=True)


def _save(file: Path, recipe: Recipe, nodes: int) -> None:
    if file.suffix != ".toml":
        raise ConfigError("a recipe is a .toml file", where="--recipe", found=str(file), fix=f"--recipe {file}.toml")
    for name, text in replays.as_files(recipe, file.stem).items():
        path = file.with_name(name)
        try:
            write_new(path, text)
        except OSError as error:
            wanted = "a FILE that is not there yet"
            raise ConfigError("it cannot be written", where=path, wanted=wanted, found=error.strerror) from error
    print(f"{file}: dray submit {shlex.quote(str(file))} --nodes {nodes}, and then: dray diff RUN NEW_RUN")
