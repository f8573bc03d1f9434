"""job.json: the submitted job of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dray.contract import files, run_folder
from dray.contract.findings import DrayError


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

    @classmethod
    def of_sbatch(cls, printed: str, argv: Sequence[str]) -> Queued:
        """The job that `sbatch --parsable` submitted; a site's wrapper may print lines of its own."""
        found = re.findall(r"^(?:Submitted batch job )?(\d+)(?:;(\S+))?\s*$", printed, re.MULTILINE)
        if not found:
            raise DrayError(
                "sbatch printed no job number", where="sbatch", wanted="a line such as 42 or 42;cluster",
                found=printed.strip()[-300:], fix="squeue --me shows whether the job is in the queue",
            )  # fmt: skip
        number, cluster = found[-1]
        return cls(job=int(number), cluster=cluster, time=time.time(), argv=list(argv))

    @property
    def id(self) -> int | str:
        """The id for Slurm's commands: 12, or 12_3."""
        return self.job if self.task is None else f"{self.job}_{self.task}"


def read(run: Path) -> Queued | None:
    """The submitted job of a run; None if there is none, or if the file is damaged."""
    with suppress(OSError, ValueError):
        return Queued.model_validate_json(files.read(run / run_folder.JOB))
    return None
