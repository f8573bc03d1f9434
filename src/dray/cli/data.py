"""`dray data`: show what a recipe's training would read, and download it, before anything is queued."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from dray.cli.args import Engine, Json, Overrides, RecipeFile
from dray.contract import exit_codes
from dray.contract.control_characters import cell, printable
from dray.contract.findings import ConfigError, counted
from dray.contract.trainer import image_tasks
from dray.runs import local
from dray.runs.prepare import read_recipe

app = typer.Typer()
Table = dict[str, Any]
_WIDTH = 400  # characters of a part that are shown


@app.command()
def inspect(
    recipe: RecipeFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, max=1000, help="Number of samples to show, from the first on.")] = 2,
    engine: Engine = "bare",
    as_json: Json = False,
) -> None:
    """Print what a run will read: datasets, tokens, lengths, and the first samples with the tokens to predict.

    It tokenizes as a run does, and a later run uses the tokens. --json prints all token ids and labels.

    dray data inspect recipes/smoke-cpu.toml --rows 2
    """
    settings = read_recipe(recipe, overrides or [])
    if not settings.train:
        raise ConfigError(
            "the data of a [command] cannot be inspected: only its program knows them",
            where=recipe,
            wanted="a recipe with [train]",
            fix="dray recipe new mine.toml writes a recipe for dray's trainer",
        )
    with TemporaryDirectory(prefix="dray-") as folder:
        report = Path(folder, "report.json")
        job = image_tasks.Inspect(settings.model_dump(mode="json"), rows, str(report))
        with redirect_stdout(sys.stderr):  # what the trainer prints
            code = local.run_in_image(
                settings, job, engine=engine, folder=Path(folder), sections=("data", "model", "evaluate")
            )
        if code:
            raise typer.Exit(code)
        found = printable(json.loads(report.read_text(encoding="utf-8")))
    if as_json:
        print(json.dumps(found))
    else:
        show(found)


@app.command()
def prefetch(recipe: RecipeFile, overrides: Overrides = None, engine: Engine = "bare") -> int:
    """Download a recipe's model, tokenizer and datasets into HF_HOME, on a machine with network; runs are offline.

    dray data prefetch recipes/gpt2-wikitext-ddp.toml
    """
    settings = read_recipe(recipe, overrides or [])
    of_hub = [name for name in settings.datasets().values() if name.startswith("hub:")]
    of_hub += [name for name in (settings.model.name, settings.model.tokenizer) if name and name[0] not in "/."]
    if not of_hub:
        print(f"{recipe}: names nothing of the hub; there is nothing to fetch")
        return exit_codes.DONE
    given = os.environ.get("HF_HOME", "")
    if given and not given.startswith("/"):
        raise ConfigError(
            "HF_HOME is not an absolute path", wanted="a folder that all nodes share", found=f"HF_HOME = {given!r}",
            fix="export HF_HOME=/a/shared/folder, here and where you submit",
        )  # fmt: skip
    home = Path(given or local.hub_cache())
    home.mkdir(parents=True, exist_ok=True)
    if not given:
        print(f"HF_HOME is not set: fetching into {home}, which all nodes must see")
    settings = settings.model_copy(update={"pass_env": tuple({*settings.pass_env, *local.hub_variables()})})
    job = image_tasks.Prefetch(**settings.model_dump(mode="json", include={"data", "model", "evaluate"}))
    return local.run_in_image(settings, job, engine=engine, folder=Path.cwd(), env={"HF_HUB_OFFLINE": "0"})


def show(found: Table) -> None:
    """Print the report for a reader."""
    print(f"{found['name']}: {found['objective']}, tokenizer {found['tokenizer']}")
    _show_figures(found)
    for dataset in found["training"] + found["evaluation"]:
        part = " (its last documents, for evaluation)" if dataset.get("held_out") else ""
        print(f"\n{dataset['key']} = {cell(dataset['dataset'])}{part}")
        _show_figures(dataset)
        if "tokens" not in dataset:
            print("  a stream: its tokens are not counted")
    for row in found["rows"]:
        source = f" of {row['source']}" if row["source"] else ""
        predicted = sum(part["tokens"] for part in row["parts"] if part["kind"] in ("predicted", "masked"))
        print(f"\nsample {row['sample']}{source}: {counted(len(row['input_ids']), 'token')}, {predicted:,} predicted")
        document = row["parts"][0]["document"]
        for part in row["parts"]:
            if part["document"] != document:
                document = part["document"]
                print("  -- attention ends here: next document")
            answer = f"  for {part['label']!r}" if part["kind"] == "masked" else ""
            # Escaped: a dataset may have control characters.
            print(f"  {part['kind']:<9}  {part['text'][:_WIDTH]!r}{answer}")


def _show_figures(table: Table) -> None:
    """A line for each number, and for each number in a table."""
    for name, value in table.items():
        figures = value if isinstance(value, dict) else {"": value}
        for inner, figure in figures.items():
            if isinstance(figure, int | float) and not isinstance(figure, bool):
                number = f"{figure:,}" if isinstance(figure, int) else f"{figure:.4g}"
                print(f"  {f'{name} {inner}'.replace('_', ' '):<28}{number}")
