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
from dray.contract import image_tasks
from dray.contract.control_characters import cell, printable
from dray.contract.findings import ConfigError, counted
from dray.runs import local, one_off_job
from dray.runs.prepare import read_recipe

app = typer.Typer(
    no_args_is_help=True, help="Show the datasets of a recipe as its model will see them, or download them."
)
Table = dict[str, Any]
_BAR, _TEXT, _PARTS = 40, 400, 40  # characters of a bar and of a text, and parts of a row


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
            code = one_off_job.once(
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
def prefetch(recipe: RecipeFile, overrides: Overrides = None, engine: Engine = "bare") -> None:
    """Download a recipe's model, tokenizer and datasets into HF_HOME, on a machine with network; runs are offline.

    dray data prefetch recipes/gpt2-wikitext-ddp.toml
    """
    settings = read_recipe(recipe, overrides or [])
    of_hub = [name for name in settings.datasets().values() if name.startswith("hub:")]
    of_hub += [name for name in (settings.model.name, settings.model.tokenizer) if name and name[0] not in "/."]
    if not of_hub:
        print(f"{recipe}: names nothing of the hub; there is nothing to fetch")
        return
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
    settings = settings.model_copy(update={"pass_env": tuple({*settings.pass_env, *one_off_job.hub_variables()})})
    job = image_tasks.Prefetch(**settings.model_dump(mode="json", include={"data", "model", "evaluate"}))
    raise typer.Exit(one_off_job.once(settings, job, engine=engine, folder=Path.cwd(), env={"HF_HUB_OFFLINE": "0"}))


def show(found: Table) -> None:
    """Print the report for a reader."""
    length, samples = found["sequence_length"], found["steps"] * found["global_size"]
    print(
        f"{found['name']}: {counted(found['steps'], 'step')} of {counted(found['global_size'], 'sample')} of "
        f"{counted(length, 'token')}, {samples * length:,} tokens in all\n"
        f"{found['objective']}, tokenizer {found['tokenizer']} of {counted(found['vocabulary'], 'token')}"
    )
    for dataset in found["training"] + found["evaluation"]:
        print("\n" + "\n".join(_dataset(dataset, length)))
    for row in found["rows"]:
        print("\n" + "\n".join(_row(row)))


def _dataset(dataset: Table, length: int) -> list[str]:
    part = ", its last documents, for evaluation" if dataset.get("held_out") else ""
    size = f"  {counted(dataset['files'], 'file')}, {dataset['bytes'] / 1e6:,.1f} MB"
    lines = [f"{dataset['key']} = {cell(dataset['dataset'])}{part}"]
    if "tokens" not in dataset:
        return [
            *lines,
            f"{size}, read as a stream of {counted(dataset['pieces'], 'shard')}; its tokens are not counted",
        ]
    figures = {name: f"{value:,}" for name, value in dataset.items() if isinstance(value, int)}
    lines.append(size + ": {documents} documents, {tokens} tokens, {samples} samples".format_map(figures))
    if "epochs" in dataset:
        share = f"{dataset['share']:.2%} of the samples, " if "share" in dataset else ""
        ends = f", ends at step {dataset['last_step']:,}" if dataset.get("last_step") else ""
        lines.append(
            f"  the run reads {share}{figures['samples_read']} samples of it, {dataset['epochs']:.2f} epochs{ends}"
        )
    about = (
        "  tokens of a document: {shortest} to {longest}, median {median}; {longer_than_a_sample} longer than a sample"
    )
    lines.append(about.format_map(figures))
    if packing := dataset.get("packing"):
        padding = packing["padding"] / (dataset["samples"] * length)
        dropped = f"{packing['dropped_tokens']:,} dropped ({packing['dropped_tokens'] / dataset['tokens']:.2%})"
        lines.append(
            f"  packing {packing['strategy']}: {packing['padding']:,} tokens of padding ({padding:.2%}), {dropped}"
        )
    most = max(dataset["lengths"].values(), default=1)
    for above, count in dataset["lengths"].items():
        bar = "#" * -(-count * _BAR // most)
        lines.append(f"  {f'to {int(above):,}':>12}  {bar:<{_BAR}} {count:,}")
    return lines


def _row(row: Table) -> list[str]:
    parts = row["parts"]
    source = f" of {row['source']}" if row["source"] else ""
    predicted = sum(part["tokens"] for part in parts if part["kind"] in ("predicted", "masked"))
    lines = [f"sample {row['sample']}{source}: {len(row['input_ids']):,} tokens, {predicted:,} predicted"]
    document = parts[0]["document"]
    for part in parts[:_PARTS]:
        if part["document"] != document:
            document = part["document"]
            lines.append("  -- attention ends here: next document")
        answer = f"  for {part['label']!r}" if part["kind"] == "masked" else ""
        text = part["text"]
        more = f" ... {len(text) - _TEXT:,} more characters" if len(text) > _TEXT else ""
        lines.append(f"  {part['kind']:<9}  {text[:_TEXT]!r}{more}{answer}")  # escaped: it may have control characters
    if len(parts) > _PARTS:
        lines.append(f"  and {counted(len(parts) - _PARTS, 'part')} more; --json prints all")
    return lines
