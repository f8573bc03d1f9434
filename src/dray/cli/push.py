"""`dray push`: a run's model to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.options import Engine
from dray.contract.findings import ConfigError
from dray.runs import desk, hub


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, whose checkpoints/final is taken.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Its name on the hub; made if it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="For all to see; else for those whom you let.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="What LoRA learnt alone, without the model.")] = False,
    engine: Engine = "bare",
) -> None:
    """Send the model of a run that has ended to the hub, with its card, as whoever HF_TOKEN is."""
    plan, folder = desk.ended(run)
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError("a model's name on the hub has two parts", wanted="OWNER/NAME", found=name)
    if adapter:
        folder = folder.with_name("adapter")
        if not folder.is_dir():
            raise ConfigError("the run trained no LoRA", where=folder, fix="leave out --adapter: the model is whole")
    recipe = plan.recipe.model_copy(update={"pass_env": hub.passed()})
    words = [str(folder), name, str(not public)]
    online = {"HF_HUB_OFFLINE": "0"}
    raise typer.Exit(desk.once(recipe, "dray.train.push", words, engine=engine, where=folder, env=online))
