"""`dray eval`: a run's model on the texts of its recipe, or on others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.options import Engine
from dray.runs import desk, write


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, whose checkpoints/final is taken.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win, such as evaluate.mine.dataset=some.txt."),
    ] = None,
    engine: Engine = "bare",
) -> None:
    """Print how well the model of a run that has ended foretells its texts, on this machine's CPUs."""
    plan, final = desk.ended(run)
    recipe = write.over(plan.recipe, overrides or [])
    given = plan.model_copy(update={"recipe": recipe}).model_dump_json()
    sees, words = ("data", "evaluate"), [str(final)]
    raise typer.Exit(desk.once(recipe, "dray.train.score", words, engine=engine, where=final, sees=sees, given=given))
