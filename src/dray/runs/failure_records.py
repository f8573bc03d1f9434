"""The failures that nodes and ranks recorded, earliest first."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dray.contract import exit_codes, failures, files, run_folder, secrets
from dray.planning.schema import Plan
from dray.runs import causes
from dray.runs.result import Cause
from dray.runs.store import RunPaths, reason

SRUN_LOG = "srun.log"
_SLURM = re.compile(
    r"^(?:slurmstepd|srun)\b.{0,80}error: .{0,200}(?:oom[_-]kill|OOM Killed|DUE TO |ode failure|missing step on )"
)
# What a task ends with that does not see the run's folder (slurm/job.sh), as srun tells it.
_BLIND = re.compile(r"^srun: error: (\S+): tasks? .*: Exited with exit code 96$", re.MULTILINE)


class Record(NamedTuple):
    """The record of one failure."""

    time: float
    cause: Cause
    lost: bool
    """Whether another node reported that this node was lost."""


def read(folder: Path, logs: Path, *, warn: Callable[[str], None]) -> list[Record]:
    """The records in order of cause; a damaged record is a warning, which names its node or rank.

    A lost node comes before the ranks that failed because of it; contract/failures.py orders the rest.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            try:
                found.append(_record(path, logs))
            except Exception as error:  # whatever is in it
                warn(f"{path} cannot be read: {reason(error)}")
    lost = {one.cause.node for one in found if one.lost}
    first = min((one.time for one in found), default=0.0)

    def order(one: Record) -> float:
        if one.cause.node in lost:  # the records of its own ranks say more
            return one.time - failures.UNNOTICED_S
        return failures.cause_order(one.time, first, lambda: causes.explained(one.cause).name == causes.FOLLOWS)

    return sorted(found, key=order)


def write_blind(paths: RunPaths) -> None:
    """Write the record of nodes that did not see the run's folder, and so could write none."""
    names = ",".join(_BLIND.findall("\n".join(files.tail(paths.logs / SRUN_LOG, 1000))))
    if not names or any(paths.failures.glob("rank-*.json")):  # a program that ends with this code leaves its own
        return
    verb = "do" if "," in names or "[" in names else "does"
    record = {
        "time": time.time(), "node": names, "rank": None, "code": exit_codes.CONFIG, "log": None, "last_lines": [],
        "why": f"{names} {verb} not see {paths.run.parent}\n  fix:    set DRAY_RUNS to a folder that all nodes share",
    }  # fmt: skip
    files.write_atomic(paths.failures / "node-blind.json", json.dumps(record))


def _record(path: Path, logs: Path) -> Record:
    record = json.loads(files.read(path))
    cause = Cause.model_validate(record)
    if cause.log is None and cause.rank is not None:  # its supervisor could write only one line
        log = logs.parent / run_folder.rank_log(cause.rank)
        cause = cause.model_copy(update={"log": str(log), "last_lines": files.tail(log)})
    return Record(float(record["time"]), cause, bool(record.get("lost")))


def by_slurm(logs: Path) -> list[str]:
    """Slurm's own messages about the end of the nodes, from their logs and srun's."""
    lines = [line for log in [*sorted(logs.glob("node-*.log")), logs / SRUN_LOG] for line in files.tail(log)]
    return list(dict.fromkeys(f"Slurm: {line[:300]}" for line in lines if _SLURM.match(line[:1000])))[:4]


def redacted(cause: Cause, plan: Plan | None) -> Cause:
    """The cause without values of pass_env, which lines of a launcher or an engine may contain."""
    values = secrets.passed(plan.recipe.pass_env if plan else (), os.environ)

    def clean(lines: list[str]) -> list[str]:
        return [secrets.redacted(line, values) for line in lines]

    changed = {"last_lines": clean(cause.last_lines), "evidence": clean(cause.evidence)}
    return cause.model_copy(update={"why": secrets.redacted(cause.why, values), **changed})
