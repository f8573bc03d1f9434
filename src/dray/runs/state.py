"""The state of a run as data, for `dray runs`, `status`, `logs` and `top`, and for --json."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict

from dray.runs.cost import Spent
from dray.runs.reading import OR_NONE
from dray.runs.stages import Live
from dray.runs.startup import Startup

QUEUED, RUNNING, DONE, FAILED, STOPPED, LOST, NO_RESULT = STATES = (
    "queued", "running", "done", "failed", "stopped", "lost", "no result",
)  # fmt: skip


class Waiting(BaseModel):
    """The waiting job of a run, as Slurm shows it."""

    model_config = ConfigDict(frozen=True)

    job: int
    id: str = ""
    """The id for Slurm's commands."""
    state: str
    reason: str
    meaning: str = ""
    """The reason in plain words; empty if it is unknown."""
    start: str | None = None
    """The start that Slurm expects, or the earliest possible."""


class State(BaseModel):
    """One run at the time of the query."""

    model_config = ConfigDict(frozen=True)

    run: str
    folder: str
    state: str
    """queued, running, done, failed, stopped, lost (the job ended without a result), or `no result` (it runs, or was
    killed before it could write one)."""
    recipe: str | None = None
    command: bool = False
    """Whether a command runs instead of dray's trainer."""
    job: int | None = None
    job_id: str | None = None
    """The id for Slurm's commands: 12, or 12_3 for an array task."""
    attempt: int | None = None
    attempts: int = 0
    nodes: list[str] = []
    ranks: int | None = None
    started: str | None = None
    """When the first attempt began, or, without one, when the run was submitted."""
    attempt_started: str | None = None
    finished: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    exit_code: int | None = None
    why: str | None = None
    """What failed, or what stopped the run."""
    goes_on: bool = False
    """Whether another attempt follows the last one."""
    waiting: Waiting | None = None
    live: Live | None = None
    """Details of a running attempt, if requested."""
    startup: Annotated[Startup | None, OR_NONE] = None
    """How long each part of the last attempt's start took, if requested."""
    spent: Annotated[Spent | None, OR_NONE] = None
    """The cost of all attempts, if the last one has ended."""
    warnings: list[str] = []
