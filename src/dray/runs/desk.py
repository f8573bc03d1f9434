"""One program of dray's in the image, on this machine, for a recipe: before its run or after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray.facts import Engine
from dray.runs import local, write
from dray.runs.finish import finish
from dray.runs.paths import RunPaths
from dray.spec.recipe import Command, Preflight, Recipe


def once(
    recipe: Recipe,
    module: str,
    words: Sequence[str],
    *,
    engine: Engine,
    image: str,
    where: Path,
    env: dict[str, str] | None = None,
    home: str | None = None,
) -> int:
    """Show what it prints as it comes; its exit code. It is a run of one rank in `where`, of which nothing stays."""
    program = Recipe(
        name=recipe.name,
        launcher="python",
        ranks_per_node=1,
        env={**recipe.env, **(env or {})},
        pass_env=recipe.pass_env,
        preflight=Preflight(when="never"),
        command=Command(argv=(image if engine == "bare" else "python3", "-m", module, *words), folder=str(where)),
    )  # of the cpu image, whatever is in it: no GPU is wanted
    facts = local.facts(program, engine=engine, image=image, nodes=1, gpus_per_node=0, site="")
    with TemporaryDirectory(prefix="dray-") as folder:
        plan = write.write(program, facts.model_copy(update={"hf_home": home}), runs=Path(folder))
        paths = RunPaths(Path(plan.folder))
        shown = 0

        def show() -> None:
            nonlocal shown
            log = paths.logs / "rank-0.log"
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
