"""Draw the showcase's output as SVG: `make showcase | .venv/bin/python benchmarks/showcase/picture.py showcase.svg`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from job import ROOT
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

WIDTH = 112
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich's are on a web server
_STYLES = {
    r"^\$ .*": "bold",
    r"^ +failed:|^\w+ loses its power": "bold red",
    r"^ +spare node:": "bold green",
}


def picture(transcript: str) -> str:
    """The SVG of a terminal; the checkout is shown as ~/dray."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in transcript.strip().replace(str(ROOT), "~/dray").splitlines():
        text = Text(line)
        for expression, style in _STYLES.items():
            text.highlight_regex(expression, style)
        console.print(text)
    return _FONTS.sub("", console.export_svg(title="make showcase", theme=DIMMED_MONOKAI, unique_id="showcase"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make showcase | .venv/bin/python benchmarks/showcase/picture.py FILE.svg")
    Path(sys.argv[1]).write_text(picture(sys.stdin.read()), encoding="utf-8")
