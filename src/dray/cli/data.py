"""`dray data`: what a recipe's training would read, before anything is queued."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dray.cli.args import Engine, Overrides, RecipeFile
from dray.contract import image_tasks
from dray.contract.control_characters import cell, printable
from dray.contract.findings import ConfigError, counted
from dray.runs import one_off_job
from dray.runs.prepare import read_recipe

app = typer.Typer(no_args_is_help=True, help="Show the datasets of a recipe as its model will see them.")
Table = dict[str, Any]
_BAR, _HEAD, _TAIL, _PARTS = 40, 300, 100, 40  # characters, and parts of a row
_STYLES = {"context": "dim", "predicted": "green", "masked": "magenta", "padding": "dim"}


@app.callback()
def _group() -> None:
    """Keep `inspect` a subcommand: without a callback Typer drops the name of an only command."""


@app.command()
def inspect(
    recipe: RecipeFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, max=1000, help="Number of samples to show, from the first on.")] = 2,
    engine: Engine = "bare",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with all token ids and labels.")
    ] = False,
) -> None:
    """Print what a run will read: datasets, tokens, lengths, and the first samples with the tokens to predict.

    It tokenizes as a run does, and a later run uses the tokens.

    dray data inspect recipes/smoke-cpu.toml --rows 2
    """
    settings = read_recipe(recipe, overrides or [])
    if not settings.train:
        raise ConfigError(
            "the data of a [command] cannot be inspected: only its program knows them",
            where=recipe,
            wanted="a recipe with [train]",
            found=f"the command {settings.command.argv[0]}" if settings.command else "no [train]",
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
        show(found, Console(highlight=False, soft_wrap=True))


def show(found: Table, console: Console) -> None:
    """The report for a reader; a terminal has colours."""
    length, samples = found["sequence_length"], found["steps"] * found["global_size"]
    lines = [
        (
            f"{found['name']}: {counted(found['steps'], 'step')} of {counted(found['global_size'], 'sample')} of "
            f"{counted(length, 'token')}, {samples * length:,} tokens in all",
            "",
        ),
        (f"{found['objective']}, tokenizer {found['tokenizer']} of {counted(found['vocabulary'], 'token')}", ""),
    ]
    for one in [*found["training"], *found["evaluation"]]:
        lines += [("", ""), *((line, "") for line in _dataset(one, length))]
    for row in found["rows"]:
        lines += [("", ""), *_row(row)]
    for line, style in lines:
        console.print(Text(line, style))


def _dataset(one: Table, length: int) -> Iterator[str]:
    part = ", its last documents, for evaluation" if one.get("held_out") else ""
    yield f"{one['key']} = {cell(one['dataset'])}{part}"
    size = f"  {counted(one['files'], 'file')}, {one['bytes'] / 1e6:,.1f} MB"
    if "tokens" not in one:
        yield f"{size}, read as a stream of {counted(one['pieces'], 'shard')}; its tokens are not counted"
        return
    yield f"{size}: {one['documents']:,} documents, {one['tokens']:,} tokens, {one['samples']:,} samples"
    if "epochs" in one:
        share = f"{one['share']:.2%} of the samples, " if "share" in one else ""
        ends = f", ends at step {one['last_step']:,}" if one.get("last_step") else ""
        yield f"  the run reads {share}{one['samples_read']:,} samples of it, {one['epochs']:.2f} epochs{ends}"
    yield (
        f"  tokens of a document: {one['shortest']:,} to {one['longest']:,}, median {one['median']:,}; "
        f"{one['longer_than_a_sample']:,} longer than a sample"
    )
    if packing := one.get("packing"):
        share = packing["padding"] / (one["samples"] * length)
        dropped = packing["dropped_tokens"]
        yield (
            f"  packing {packing['strategy']}: {packing['padding']:,} tokens of padding ({share:.2%}), "
            f"{dropped:,} dropped" + f" ({dropped / one['tokens']:.2%}; bfd_split drops none)" * bool(dropped)
        )
    most = max(one["lengths"].values(), default=1)
    for above, count in one["lengths"].items():
        yield f"  {f'to {int(above):,}':>12}  {'#' * -(-count * _BAR // most):<{_BAR}} {count:,}"


def _row(row: Table) -> Iterator[tuple[str, str]]:
    source = f" of {row['source']}" if row["source"] else ""
    predicted = sum(part["tokens"] for part in row["parts"] if part["kind"] in ("predicted", "masked"))
    yield f"sample {row['sample']}{source}: {len(row['input_ids']):,} tokens, {predicted:,} predicted", "bold"
    document = row["parts"][0]["document"]
    for part in row["parts"][:_PARTS]:
        if part["document"] != document:
            document = part["document"]
            yield "  -- attention ends here: next document", "yellow"
        answer = f"  for {_quoted(part['label'])}" if part["kind"] == "masked" else ""
        yield f"  {part['kind']:<9}  {_quoted(part['text'])}{answer}", _STYLES[part["kind"]]
    if left := row["parts"][_PARTS:]:
        yield f"  and {counted(len(left), 'part')} more; --json prints all", ""


def _quoted(text: str) -> str:
    """The text on one line, escaped: a dataset may hold control characters."""
    left = len(text) - _HEAD - _TAIL
    return repr(text) if left <= 0 else f"{text[:_HEAD]!r} ... {left:,} characters ... {text[-_TAIL:]!r}"
