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
from dray.cli.on import On, bring_back
from dray.cli.options import Runs, typed
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.runs.report import html, sections
from dray.runs.report.data import gather
from dray.runs.stop import utc
from dray.runs.store import find

_MOST = 24  # colours and dashes that can be told apart
_OWN = re.compile(rb"<footer><p>Made by dray \S+ at \S+Z\.</p></footer>")
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
        typer.Option("--out", metavar="FILE", help="File to write, .html. Default: dray-report-RUN.html."),
    ] = None,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Write a report of a run, or of several side by side: one HTML page that needs no network.

    dray report 4711 4712 --out compared.html
    """
    if out and out.suffix != ".html":
        raise ConfigError(
            "--out has a wrong ending", wanted="a FILE that ends in .html", found=ascii(str(out)),
            fix=f"--out={shlex.quote(str(out.with_suffix('.html')) if out.name else 'report.html')}",
        )  # fmt: skip
    if on:
        bring_back(on, ["report", *(named or [])], out, runs if typed(context, "runs") else None, _require)
        return
    folders = list(dict.fromkeys(find(name, runs) for name in named or [""]))
    if len(folders) > _MOST:
        raise ConfigError("too many runs for one report", wanted=f"at most {_MOST}", found=str(len(folders)))
    gathered = [gather(folder) for folder in folders]
    made = f"Made by dray {__version__} at {utc(time.time())}."
    document = sections.document(gathered, made)
    name = gathered[0].paths.run.name if len(gathered) == 1 else "runs"
    target = out or Path(f"dray-report-{name}.html")
    _require(target)
    try:
        files.write_atomic(target, html.page(document))
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
        fix="another name, such as --out=dray-report.html",
    )
