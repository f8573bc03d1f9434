"""`dray export`: a checkpoint as a model that anybody can load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dray.cli.options import Engine
from dray.contract.findings import ConfigError
from dray.runs import desk, write
from dray.runs.paths import newest_attempt


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, ended or not.")],
    step: Annotated[int | None, typer.Option(min=1, help="Of which checkpoint; else the newest.")] = None,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where it goes; else RUN/exports/step-N.")] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Type of the weights.")] = "fp32",
    shard_gb: Annotated[float, typer.Option(min=1e-6, help="Largest file, and so the memory that it takes.")] = 4.0,
    engine: Engine = "bare",
) -> None:
    """Write a checkpoint's weights as safetensors with configuration and tokenizer, on one CPU, whoever made it."""
    paths = newest_attempt(run)
    plan = write.read(paths)
    folder = Path(plan.recipe.checkpoint.folder or paths.checkpoints)
    steps = sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit())
    if not steps or (step and step not in steps):
        raise ConfigError(
            f"there is no checkpoint of step {step}" if step else "there is no checkpoint",
            where=folder,
            found=f"steps {', '.join(map(str, steps))}" if steps else "none",
            fix="name one of these: --step" if steps else "set checkpoint.every; the last model is checkpoints/final",
        )
    chosen = step or steps[-1]
    target = (to or paths.run / "exports" / f"step-{chosen}").absolute()
    if target.exists():
        raise ConfigError("there is something already", where=target, fix="name another place: --to")
    target.parent.mkdir(parents=True, exist_ok=True)
    words = [str(folder / f"step-{chosen}"), str(target), str(shard_gb), dtype]
    held = plan.recipe.checkpoint.model_copy(update={"folder": str(folder)})
    recipe = plan.recipe.model_copy(update={"checkpoint": held})
    raise typer.Exit(
        desk.once(
            recipe, "dray.train.export", words, engine=engine, where=target.parent, sees=("model", "checkpoint"),
            given=plan.model_dump_json(),
        )
    )  # fmt: skip
