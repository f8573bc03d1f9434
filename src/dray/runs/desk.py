"""One program of dray's in the image, on this machine, for a recipe: before its run or after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import engines
from dray.config.recipe import Command, Preflight, Recipe
from dray.contract.findings import ConfigError
from dray.facts import Engine
from dray.planning.plan import Plan
from dray.runs import local, write
from dray.runs.finish import finish
from dray.runs.paths import new_id, newest_attempt


def ended(run: Path) -> tuple[Plan, Path]:
    """The plan of a run, and the model that it left."""
    paths = newest_attempt(run)
    plan, final = write.read(paths), paths.final_model
    if not final.is_dir():
        raise ConfigError(
            "the run has left no model",
            where=final,
            found="a run that has not come to its end" if plan.recipe.train else "a run of a program of the user's own",
            fix="let it end: the same command again goes on from its checkpoints, where checkpoint.folder is set",
        )
    return plan, final


def once(
    recipe: Recipe,
    module: str,
    words: Sequence[str],
    *,
    engine: Engine,
    where: Path,
    env: dict[str, str] | None = None,
    sees: Sequence[str] = (),
    given: str = "",
) -> int:
    """Show what it prints as it comes; its exit code. It is a run of one rank in `where`, of which nothing stays.

    A container sees that folder, and what the recipe's sections named in `sees` name. What is `given` is in a file,
    whose path is the last of the words.
    """
    named = new_id(recipe.name)
    known = {**recipe.env, **(env or {})}
    image = local.image_of(engine, recipe)
    seen = {name: getattr(recipe, name) for name in sees}
    if "data" in seen:
        seen["data"] = recipe.data.model_copy(update={"streaming": False})  # which is how it was learnt
    facts = local.facts(recipe, engine=engine, image=image, nodes=1, gpus_per_node=0, site="")
    with TemporaryDirectory(prefix="dray-") as folder:
        told = Path(folder, named, "given.json")
        argv = (engines.get(engine).python(image), "-m", module, *words, *([str(told)] if given else []))
        program = Recipe(
            name=recipe.name,
            launcher="python",
            ranks_per_node=1,
            env=known,
            pass_env=tuple(name for name in recipe.pass_env if name not in known),
            preflight=Preflight(when="never"),
            command=Command(argv=argv, folder=str(where)),
        ).model_copy(update=seen)  # of the cpu image, whatever is in it: no GPU is wanted
        plan, paths = write.write(program, facts, runs=Path(folder), run=named)
        told.write_text(given, encoding="utf-8")
        shown = 0

        def show() -> None:
            nonlocal shown
            log = paths.rank_log(0)
            if log.exists():
                with log.open("rb") as file:
                    file.seek(shown)
                    new = file.read()
                shown += len(new)
                sys.stdout.write(new.decode(errors="replace"))
                sys.stdout.flush()

        code = local.run(plan, paths, watch=show)
        show()
        ended = finish(paths, code=code)
        if ended.cause and not shown:  # it never began
            print("\n".join(ended.cause.last_lines), file=sys.stderr)
        return ended.exit_code
