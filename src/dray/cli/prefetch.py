"""`dray prefetch`: download what a recipe needs from the hub, before its run."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from dray.cli.args import Engine, Overrides, RecipeFile
from dray.contract import image_tasks
from dray.contract.findings import ConfigError
from dray.runs import local, one_off_job
from dray.runs.prepare import read_recipe


def prefetch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    engine: Engine = "bare",
) -> None:
    """Download a recipe's model, tokenizer and datasets into HF_HOME, on a machine with network; runs are offline.

    dray prefetch recipes/gpt2-wikitext-ddp.toml
    """
    settings = read_recipe(recipe, overrides or [])
    named = [name for name in settings.datasets().values() if name.startswith("hub:")]
    named += [name for name in (settings.model.name, settings.model.tokenizer) if name and name[0] not in "/."]
    if not named:
        print(f"{recipe}: names nothing of the hub; there is nothing to fetch")
        return
    given = os.environ.get("HF_HOME", "")
    if given and not given.startswith("/"):
        raise ConfigError(
            "HF_HOME is not an absolute path",
            wanted="a folder that all nodes share",
            found=f"HF_HOME = {given!r}",
            fix="export HF_HOME=/a/shared/folder, here and where you submit",
        )
    home = Path(given) if given else local.hub_cache()
    home.mkdir(parents=True, exist_ok=True)
    if not given:
        print(f"HF_HOME is not set: fetching into {home}, which all nodes must see")
    settings = settings.model_copy(
        update={"pass_env": tuple(dict.fromkeys((*settings.pass_env, *one_off_job.hub_variables())))}
    )
    sections = settings.model_dump(mode="json", include={"data", "model", "evaluate"})
    code = one_off_job.once(
        settings,
        image_tasks.Prefetch(**sections),
        engine=engine,
        folder=Path.cwd(),
        env={"HF_HUB_OFFLINE": "0"},
    )
    raise typer.Exit(code)
