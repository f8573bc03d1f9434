"""What a recipe says of a run's beginning and of its folder."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dray.config.model import Spec
from dray.config.training import Count

HangTimeout = Annotated[int, Field(ge=0, le=604_800)]
"""Seconds; at most a week."""


class Preflight(Spec):
    """What the nodes prove to one another before the launch."""

    when: Literal["several", "always", "never"] = "several"
    """several: in runs of several nodes; always: on one node too."""
    timeout_s: Count = 60
    """Seconds that all collectives together may take, after the rendezvous."""
    megabytes: Count = 64
    """The largest message of the bandwidth sweep."""
    free_gb: Annotated[float, Field(ge=0)] = 1.0
    """Free space that /tmp and the run folder must have on each node."""
    shared_memory_gb: Annotated[float, Field(ge=0)] = 0.5
    """Size that /dev/shm must have."""


class Runs(Spec):
    """The run folder."""

    share: Literal["none", "group"] = "none"
    """Who may read it besides you: no one, or your group; the run's secret stays yours alone."""
