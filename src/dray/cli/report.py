"""`dray report`: one page about a run, or about several side by side."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from dray import __version__
from dray.cli.on import On, bring_back, hand_over
from dray.cli.options import Runs, typed
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.runs.named import find
from dray.runs.report import html, sections
from dray.runs.report import markdown as marked
from dray.runs.report.data import gather
from dray.runs.stop import utc

_MOST = 24  # colours and dashes that can be told apart
_OWN = re.compile(rb"\nMade by dray \S+ at \S+Z\.\n|<footer><p>Made by dray \S+ at \S+Z\.</p></footer>")
_END = 1024  # bytes at the end of a report, which have that line


def report(
    context: typer.Context,
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Runs: folders, names or their beginnings, or job numbers. Default: the newest."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write, .html or .md. Default: dray-report-RUN.html."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write Markdown instead of HTML; print it without --out.")
    ] = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Write a report of a run, or of several side by side: one HTML page that needs no network, or Markdown.

    dray report 4711 4712 --out compared.html
    """
    endings = (".md",) if markdown else (".html", ".md")
    if out and out.suffix not in endings:
        raise ConfigError(
            "--out has a wrong ending", wanted=f"a FILE that ends in {' or '.join(endings)}", found=ascii(str(out)),
            fix=f"--out={shlex.quote(str(out.with_suffix(endings[0])) if out.name else f'report{endings[0]}')}",
        )  # fmt: skip
    markdown = markdown or bool(out and out.suffix == ".md")
    if on and (out or not markdown):
        written = ["--markdown", "--out=report.md"] if markdown else []
        asked = ["report", *(named or []), *written]
        bring_back(on, asked, out, runs if typed(context, "runs") else None, _require)
        return
    hand_over(on)
    folders = list(dict.fromkeys(find(name, runs) for name in named or [""]))
    if len(folders) > _MOST:
        raise ConfigError("too many runs for one report", wanted=f"at most {_MOST}", found=str(len(folders)))
    gathered = [gather(folder) for folder in folders]
    made = f"Made by dray {__version__} at {utc(time.time())}."
    document = sections.document(gathered, made)
    if markdown and not out:
        print(marked.page(document), end="")
        return
    name = gathered[0].paths.run.name if len(gathered) == 1 else "runs"
    target = out or Path(f"dray-report-{name}.html")
    _require(target)
    try:
        files.write_atomic(target, (marked if markdown else html).page(document))
    except OSError as error:
        raise ConfigError(
            "the report cannot be written", where=target, found=error.strerror or error, fix="--out=FILE"
        ) from error
    print(f"report: {target.absolute()}")


def _require(file: Path) -> None:
    """Refuse a FILE that dray did not write: a mistyped option must not cost a recipe."""
    if not os.path.lexists(file):
        return
    found = "a file that dray did not write"
    try:
        if _OWN.search(files.end(file, _END)[0]):
            return
    except OSError as error:
        found = error.strerror or str(error)
    raise ConfigError(
        "the report would replace a file that is not a report",
        where=file,
        wanted="a new file, or an older report of dray",
        found=found,
        fix=f"another name, such as --out=dray-report{file.suffix}",
    )
