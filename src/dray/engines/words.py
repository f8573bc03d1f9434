"""The words of an engine's command line."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OnNode:
    """An option whose value only the node knows: a variable, expanded by the node's own shell."""

    option: str
    variable: str


@dataclass(frozen=True)
class Each:
    """All words of an array that the node's own script has filled."""

    variable: str


@dataclass(frozen=True)
class Filled:
    """One word that the node's own script has found."""

    variable: str


Word = str | OnNode | Each | Filled


def csv_line(fields: Sequence[str]) -> str:
    """Mount options: one line of CSV in every engine, quoted where a path holds a comma or a quote."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
