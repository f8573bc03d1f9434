"""The words of an engine's command line."""

from __future__ import annotations

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
