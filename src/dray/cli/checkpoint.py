"""`dray checkpoint`: checkpoints of other programs become dray's, or a model to begin from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from dray.cli.chosen import Engine, found
from dray.config.recipe import Command, Recipe
from dray.config.training import Evaluation
from dray.contract import jobs
from dray.contract.findings import ConfigError
from dray.runs import desk
from dray.runs.write import read_recipe

app = typer.Typer(no_args_is_help=True, help="Import checkpoints of Trainer, DeepSpeed and torch's DCP.")


@app.callback()
def _group() -> None:
    """So that `import` stays a word of its own."""


@app.command("import")
def take(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A Trainer's checkpoint-N, a DeepSpeed or DCP folder, or a .safetensors, .bin or .pt file.",
        ),
    ],
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="Write a checkpoint into its checkpoint.folder, to resume from."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the recipe's.")
    ] = None,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write a model, to begin from or to share.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where config.json and the tokenizer are, if not beside it.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="What stands before the names of the model's tensors, such as app.model. with its dot."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="Type of the model's weights; auto: as they are.")
    ] = "auto",
    shard_gb: Annotated[float, typer.Option(min=1e-6, help="Largest file of the model.")] = 4.0,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code of its pickles, where you know who wrote them.")
    ] = False,
    engine: Engine = "bare",
) -> None:
    """Write another program's checkpoint as a model (--to), as a checkpoint that a recipe resumes from, or as both.

    dray checkpoint import output/checkpoint-500 --to my-model
    """
    source = source.absolute()
    if not source.exists():
        raise ConfigError("there is no such checkpoint", where=source, fix="name its folder or file")
    if to is None and recipe is None:
        raise ConfigError(
            "nothing is asked for",
            wanted="--to FOLDER, a recipe, or both",
            fix=f"dray checkpoint import {shlex.quote(str(source))} --to FOLDER",
        )
    if config is not None and not (config / "config.json").is_file():
        raise ConfigError("there is no config.json", where=config, fix="--config FOLDER, of save_pretrained's")
    target = to.absolute() if to else None
    if target and (target.exists() or target.is_symlink()):
        raise ConfigError("the target exists already", where=target, fix="name another folder: --to")
    settings = _to_resume(found(recipe), overrides or []) if recipe else None
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
    job = jobs.Importing(
        str(source),
        str(target or ""),
        recipe=settings.model_dump(mode="json") if settings else {},
        config=str(config.absolute()) if config else "",
        prefix=prefix,
        dtype=dtype,
        shard_gb=shard_gb,
        trust=trust,
    )
    seen = settings or Recipe(name="import", image="cpu", command=Command(argv=("true",)))
    # A container sees what the recipe's datasets are, so these are two more.
    places = {"source": source.parent} | ({"config": config.absolute()} if config else {})
    more = {name: Evaluation(dataset=str(place)) for name, place in places.items()}
    seen = seen.model_copy(update={"evaluate": {**seen.evaluate, **more}})
    sections = ("data", "model", "checkpoint", "evaluate") if settings else ("evaluate",)
    folder = target.parent if target else Path(seen.checkpoint.folder)
    raise typer.Exit(desk.once(seen, job, engine=engine, folder=folder, sections=sections))


def _to_resume(path: Path, overrides: list[str]) -> Recipe:
    """The recipe, where a run of it can resume from somebody else's checkpoint."""
    recipe = read_recipe(path, overrides)
    folder = recipe.checkpoint.folder
    wrong = None
    if not recipe.train:
        wrong = "a recipe with [train]", "a recipe of a command", "dray recipe new mine.toml"
    elif not folder:
        wrong = "checkpoint.folder, where its runs look for checkpoints", "none", "checkpoint.folder=FOLDER"
    elif recipe.lora and recipe.lora.enabled:
        wrong = "all weights trained", "[lora]", "lora.enabled=false"
    elif recipe.analog and recipe.analog.enabled:
        wrong = "the model's own layers", "[analog]", "analog.enabled=false"
    elif recipe.data.streaming:
        wrong = "tokens on the disk, whose position is the step", "data.streaming = true", "data.streaming=false"
    if wrong:
        wanted, seen, fix = wrong
        raise ConfigError(
            "this recipe cannot resume from somebody else's checkpoint", where=path, wanted=wanted, found=seen, fix=fix
        )
    if steps := sorted(one.name for one in Path(folder).glob("step-*")):
        raise ConfigError(
            "the folder has checkpoints already", where=folder, wanted="an empty checkpoint.folder",
            found=", ".join(steps[:8]), fix="checkpoint.folder=ANOTHER",
        )  # fmt: skip
    Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
    return recipe
