"""job.json: the submitted job of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Queued(BaseModel):
    """The content of job.json."""

    model_config = ConfigDict(frozen=True)

    job: Annotated[int, Field(ge=1)]
    task: Annotated[int, Field(ge=0)] | None = None
    """The task number, if the job is an array."""
    cluster: Annotated[str, Field(pattern="^([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?$")] = ""
    """The cluster's name, if sbatch knows several."""
    time: float
    argv: list[str]
    stopped: float | None = None
    """When `dray stop` cancelled the job in the queue."""

    @property
    def id(self) -> int | str:
        """The id for Slurm's commands: 12, or 12_3."""
        return self.job if self.task is None else f"{self.job}_{self.task}"
