"""How a run is, as data: what `dray runs`, `status`, `logs` and `top` show, and print with --json."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from dray.runs.cost import Spent
from dray.runs.stages import Live
from dray.runs.startup import Startup

QUEUED, RUNNING, DONE, FAILED, STOPPED, LOST, NO_RESULT = STATES = (
    "queued", "running", "done", "failed", "stopped", "lost", "no result",
)  # fmt: skip


class Waiting(BaseModel):
    """What Slurm tells of the job that a run waits for."""

    model_config = ConfigDict(frozen=True)

    job: int
    id: str = ""
    """The same as Slurm's commands take it."""
    state: str
    reason: str
    meaning: str = ""
    """The reason in plain words; empty where it is unknown here."""
    start: str | None = None
    """When Slurm expects to start it, or may at the earliest."""


class State(BaseModel):
    """One run, as it was a moment ago."""

    model_config = ConfigDict(frozen=True)

    run: str
    folder: str
    state: str
    """queued, running, done, failed, stopped, lost (its job is gone and left no result), or `no result`: it runs, or
    was killed before it could write one."""
    recipe: str | None = None
    command: bool = False
    """Whether a command runs in the place of dray's trainer."""
    job: int | None = None
    job_id: str | None = None
    """The same as Slurm's commands take it: 12, or 12_3 where it is a task of an array."""
    attempt: int | None = None
    attempts: int = 0
    nodes: list[str] = []
    ranks: int | None = None
    started: str | None = None
    """When the first attempt began; of one that has none, when it was submitted."""
    attempt_started: str | None = None
    finished: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    exit_code: int | None = None
    why: str | None = None
    """What failed, or what stopped it."""
    goes_on: bool = False
    """Whether its last attempt ended with another one to follow."""
    waiting: Waiting | None = None
    live: Live | None = None
    """Of one that runs, where it was looked at closely."""
    startup: Startup | None = None
    """How long each part of the last attempt's start took, where it was looked at closely."""
    spent: Spent | None = None
    """What all attempts together cost, of one whose last attempt has ended."""
    warnings: list[str] = []
