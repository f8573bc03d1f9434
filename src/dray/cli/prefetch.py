"""`dray prefetch`: what a recipe needs of the hub, brought where its run will look for it."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from dray.cli.options import Engine, Overrides, RecipeFile
from dray.contract.findings import ConfigError
from dray.runs import desk, hub
from dray.runs.write import read_recipe


def prefetch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    engine: Engine = "bare",
) -> None:
    """Fetch a recipe's model, tokenizer and texts into HF_HOME, on a machine that reaches the hub; runs are offline."""
    settings = read_recipe(recipe, overrides or [])
    texts = (settings.data.train, settings.data.validation, settings.data.test)
    named = [said for said in (*texts, *(one.dataset for one in settings.evaluate.values())) if said.startswith("hub:")]
    named += [said for said in (settings.model.name, settings.model.tokenizer) if said and said[0] not in "/."]
    if not named:
        print(f"{recipe}: names nothing of the hub; there is nothing to fetch")
        return
    home = os.environ.get("HF_HOME", "")
    if not home.startswith("/"):
        raise ConfigError(
            "prefetch wants to know where runs will look",
            wanted="HF_HOME, a folder on a disk that all nodes share",
            found=f"HF_HOME = {home!r}" if home else "HF_HOME is not set",
            fix="export HF_HOME=/a/shared/folder, here and where you submit",
        )
    Path(home).mkdir(parents=True, exist_ok=True)
    mine = tuple(dict.fromkeys((*settings.pass_env, *hub.passed())))
    settings = settings.model_copy(update={"pass_env": mine})
    code = desk.once(
        settings,
        "dray.train.prefetch",
        [settings.model_dump_json(include={"data", "model", "evaluate"})],
        engine=engine,
        where=Path.cwd(),
        env={"HF_HUB_OFFLINE": "0"},
    )
    raise typer.Exit(code)
