"""[runs] of a recipe: the run folder; and the limits for a run that hangs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dray.config.model import Spec

HangTimeout = Annotated[int, Field(ge=0, le=604_800)]
"""Seconds, at most a week."""


class Runs(Spec):
    """The run folder."""

    share: Literal["none", "group"] = "none"
    """Who may read it besides you: no one, or your group. Only you may read the run's secret."""
