"""[preflight] of a recipe: checks before the launch, of each node by itself and of all nodes together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dray.config.model import Spec
from dray.config.training import Count


class Preflight(Spec):
    """Checks of each node before the rendezvous, and of all nodes together after it."""

    when: Literal["several", "always", "never"] = "several"
    """several: only in runs of several nodes; always: on one node too."""
    timeout_s: Count = 60
    """Seconds that all collectives together may take, after the rendezvous."""
    megabytes: Count = 64
    """The largest message of the bandwidth sweep."""
    free_gb: Annotated[float, Field(ge=0)] = 1.0
    """Free space that /tmp and the run folder must have on each node."""
    shared_memory_gb: Annotated[float, Field(ge=0)] = 0.5
    """Size that /dev/shm must have."""
    memory_gb: Annotated[float, Field(ge=0)] = 0.5
    """Memory that the job must have on each node, both available and allowed by its cgroup."""
