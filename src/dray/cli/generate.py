"""`dray generate`: let a run's model write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.options import Engine
from dray.runs import desk


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, whose checkpoints/final is taken.")],
    prompt: Annotated[
        str, typer.Argument(help="What it goes on from; a model that learnt to answer, answers it.")
    ] = "",
    tokens: Annotated[int | None, typer.Option(min=1, help="How many it writes; else 64, or what fits.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest each time.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="For a temperature above 0.")] = 0,
    engine: Engine = "bare",
) -> None:
    """Print a prompt and what the model of a run that has ended makes of it, on this machine's CPUs."""
    plan, final = desk.ended(run)
    recipe = plan.recipe
    chats = bool(recipe.train and recipe.train.objective == "sft")
    words = [str(final), prompt, str(tokens or 0), str(temperature), str(seed), str(recipe.model.trust_remote_code)]
    words.append(str(chats))
    raise typer.Exit(desk.once(recipe, "dray.train.generate", words, engine=engine, where=final))
