"""job.json: what was put into the queue, before it has an attempt."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Queued(BaseModel):
    """job.json: what was put into the queue."""

    model_config = ConfigDict(frozen=True)

    job: Annotated[int, Field(ge=1)]
    cluster: str = ""
    """Of several that one sbatch knows."""
    time: float
    argv: list[str]
