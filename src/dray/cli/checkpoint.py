"""`dray checkpoint`: import checkpoints of Trainer, DeepSpeed and torch's DCP."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from dray.cli.args import Engine, found
from dray.config.recipe import Command, Recipe
from dray.config.training import Evaluation
from dray.contract import image_tasks
from dray.contract.findings import ConfigError
from dray.runs import one_off_job
from dray.runs.prepare import read_recipe

app = typer.Typer(no_args_is_help=True, help="Import checkpoints of Trainer, DeepSpeed and torch's DCP.")


@app.callback()
def _group() -> None:
    """Keep `import` a subcommand: without a callback Typer drops the name of an only command."""


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
        typer.Argument(
            metavar="[RECIPE]", help="Recipe to resume with: write a checkpoint into its checkpoint.folder."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the recipe's.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a model into this folder, to start from or to share.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of config.json and tokenizer. Default: the checkpoint's."),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Prefix of the model's tensor names in the checkpoint, with its dot, such as `app.model.`"),
    ] = None,
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="Type of the written weights; auto keeps their type.")
    ] = "auto",
    shard_gb: Annotated[float, typer.Option(min=1e-6, help="Largest size of one weight file, in GB.")] = 4.0,
    trust: Annotated[
        bool, typer.Option("--trust", help="Load its pickles, which can run code: only if you trust who wrote them.")
    ] = False,
    engine: Engine = "bare",
) -> None:
    """Import another program's checkpoint as a model (--to), as a checkpoint that a recipe resumes from, or as both.

    dray checkpoint import output/checkpoint-500 --to my-model
    """
    source = source.absolute()
    if not source.exists():
        raise ConfigError("the checkpoint does not exist", where=source, fix="give the path of its folder or file")
    if to is None and recipe is None:
        raise ConfigError(
            "there is nothing to write: neither --to nor a recipe was given",
            wanted="--to FOLDER, a recipe, or both",
            fix=f"dray checkpoint import {shlex.quote(str(source))} --to FOLDER",
        )
    if config is not None and not (config / "config.json").is_file():
        raise ConfigError(
            "--config names a folder without config.json",
            where=config,
            fix="--config FOLDER, written by save_pretrained",
        )
    target = to.absolute() if to else None
    if target and (target.exists() or target.is_symlink()):
        raise ConfigError("the target exists already", where=target, fix="--to ANOTHER_FOLDER")
    settings = _to_resume(found(recipe), overrides or []) if recipe else None
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
    job = image_tasks.Importing(
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
    # A container gets the recipe's datasets as binds, so the checkpoint and --config are listed as two more.
    places = {"source": source.parent} | ({"config": config.absolute()} if config else {})
    more = {name: Evaluation(dataset=str(place)) for name, place in places.items()}
    seen = seen.model_copy(update={"evaluate": {**seen.evaluate, **more}})
    sections = ("data", "model", "checkpoint", "evaluate") if settings else ("evaluate",)
    folder = target.parent if target else Path(seen.checkpoint.folder)
    raise typer.Exit(one_off_job.once(seen, job, engine=engine, folder=folder, sections=sections))


def _to_resume(path: Path, overrides: list[str]) -> Recipe:
    """The recipe, if a run of it can resume from another program's checkpoint."""
    recipe = read_recipe(path, overrides)
    folder = recipe.checkpoint.folder
    wrong = None
    if not recipe.train:
        wrong = "a recipe with [train]", "a recipe with [command]", "dray recipe new mine.toml"
    elif not folder:
        wrong = "checkpoint.folder, in which its runs look for checkpoints", "none", "checkpoint.folder=FOLDER"
    elif recipe.lora and recipe.lora.enabled:
        wrong = "a recipe that trains all weights", "[lora]", "lora.enabled=false"
    elif recipe.analog and recipe.analog.enabled:
        wrong = "a recipe without analog layers", "[analog]", "analog.enabled=false"
    elif recipe.data.streaming:
        wrong = (
            "a dataset on the disk, in which the step gives the position",
            "data.streaming = true",
            "data.streaming=false",
        )
    if wrong:
        wanted, seen, fix = wrong
        raise ConfigError(
            "this recipe cannot resume from another program's checkpoint",
            where=path,
            wanted=wanted,
            found=seen,
            fix=fix,
        )
    if steps := sorted(one.name for one in Path(folder).glob("step-*")):
        raise ConfigError(
            "the folder has checkpoints already", where=folder, wanted="an empty checkpoint.folder",
            found=", ".join(steps[:8]), fix="checkpoint.folder=ANOTHER",
        )  # fmt: skip
    Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
    return recipe
