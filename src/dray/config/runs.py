"""What a recipe says of a run's folder, and of a run that hangs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dray.config.model import Spec

HangTimeout = Annotated[int, Field(ge=0, le=604_800)]
"""Seconds; at most a week."""


class Runs(Spec):
    """The run folder."""

    share: Literal["none", "group"] = "none"
    """Who may read it besides you: no one, or your group; the run's secret stays yours alone."""
    logs_by_node_above: Annotated[int, Field(ge=0)] = 512
    """A run of more ranks than these keeps one log for each node, with the rank before each line, and no file for each
    rank. `dray logs --rank` shows a rank's lines. 0: always so."""
