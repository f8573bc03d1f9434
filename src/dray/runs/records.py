"""The failures that nodes and ranks recorded, earliest first."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dray.contract import exit_codes, files, root_cause, run_folder, secrets
from dray.planning.schema import Plan
from dray.runs import causes
from dray.runs.result import Cause
from dray.runs.store import reason, written

_MOST = 65_536
SRUN_LOG = "srun.log"
_SLURM = re.compile(
    r"^(?:slurmstepd|srun)\b.{0,80}error: .{0,200}(?:oom[_-]kill|OOM Killed|DUE TO |ode failure|missing step on )"
)


class Record(NamedTuple):
    """The record of one failure."""

    time: float
    cause: Cause
    lost: bool
    """Whether another node reported that this node was lost."""


def read(folder: Path, logs: Path, *, code: int, warn: Callable[[str], None]) -> list[Record]:
    """The records in order of cause; a damaged record gets `code`.

    A lost node comes before the ranks that failed because of it; contract/root_cause.py orders the rest.
    """
    paths = [path for path in sorted(folder.iterdir())[:_MOST] if path.suffix == ".json"]
    found = [_record(path, logs, code, warn) for path in paths]
    lost = {one.cause.node for one in found if one.lost}
    first = min((one.time for one in found), default=0.0)

    def order(one: Record) -> float:
        if one.cause.node in lost:  # the records of its own ranks say more
            return one.time - root_cause.UNNOTICED_S
        return root_cause.order(one.time, first, lambda: causes.explained(one.cause).name == causes.FOLLOWS)

    return sorted(found, key=order)


def _record(path: Path, logs: Path, code: int, warn: Callable[[str], None]) -> Record:
    """The record in a file; a damaged one still says who failed."""
    try:
        record = json.loads(files.read(path))
        time = float(record["time"])
        if not math.isfinite(time):
            raise ValueError(f"its time is {time}")
        cause = Cause.model_validate(record)
        if cause.log is None and cause.rank is not None:  # its supervisor could write only one line
            log = logs.parent / run_folder.rank_log(cause.rank)
            cause = cause.model_copy(update={"log": str(log), "last_lines": files.tail(log)})
        return Record(time, cause, bool(record.get("lost")))
    except Exception as error:
        warn(f"{path} cannot be read: {reason(error)}")
    kind, _, number = path.stem.partition("-")
    rank = int(number) if kind == "rank" and re.fullmatch("[0-9]{1,9}", number) else None
    log = logs / f"{path.stem}.log"
    why = f"it failed, but its record is damaged ({path.name})"
    code = code or exit_codes.FAILED
    cause = Cause(node="", rank=rank, code=code, why=why, log=str(log), last_lines=files.tail(log))
    return Record(written(path) or 0.0, cause, lost=False)


def by_slurm(logs: Path) -> list[str]:
    """Slurm's own messages about the end of the nodes, from their logs and srun's."""
    lines = [line for log in [*sorted(logs.glob("node-*.log"))[:256], logs / SRUN_LOG] for line in files.tail(log)]
    return list(dict.fromkeys(f"Slurm: {line[:300]}" for line in lines if _SLURM.match(line[:1000])))[:4]


def redacted(cause: Cause, plan: Plan | None) -> Cause:
    """The cause without values of pass_env, which lines of a launcher or an engine may contain."""
    values = secrets.passed(plan.recipe.pass_env if plan else (), os.environ)

    def clean(lines: list[str]) -> list[str]:
        return [secrets.redacted(line, values) for line in lines]

    changed = {"last_lines": clean(cause.last_lines), "evidence": clean(cause.evidence)}
    return cause.model_copy(update={"why": secrets.redacted(cause.why, values), **changed})
