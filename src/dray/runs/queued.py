"""job.json: what was put into the queue, before it has an attempt."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Queued(BaseModel):
    """job.json: what was put into the queue."""

    model_config = ConfigDict(frozen=True)

    job: Annotated[int, Field(ge=1)]
    task: Annotated[int, Field(ge=0)] | None = None
    """Of the array that the job is."""
    cluster: Annotated[str, Field(pattern="^([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?$")] = ""
    """Of several that one sbatch knows."""
    time: float
    argv: list[str]
    stopped: float | None = None
    """When `dray stop` took it out of the queue, before it had begun an attempt."""

    @property
    def id(self) -> int | str:
        """As Slurm's commands take it: 12, or 12_3."""
        return self.job if self.task is None else f"{self.job}_{self.task}"
