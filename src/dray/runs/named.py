"""Which run is meant: a folder, a run's name or its beginning, a job's number, or nothing, for the newest."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError
from dray.runs.paths import attempts, default_runs, numbered

_SHOWN = 6
_ID = re.compile("[0-9]{1,18}(_[0-9]{1,18})?")
_JOB = re.compile(rb"^job=([0-9]{1,18})$", re.MULTILINE)
_TASK = re.compile(rb"^task=([0-9]{1,18}_[0-9]{1,18})$", re.MULTILINE)
_CLUSTER = re.compile(rb"^cluster=(.+)$", re.MULTILINE)
_MOST = 1 << 20  # bytes of a file that is read for a job's number


def find(named: str = "", runs: Path | None = None) -> Path:
    """The folder of a run, or of one of its attempts if that was named."""
    runs = (runs or default_runs()).absolute()
    if not named:
        return _newest(runs)
    folder = Path(named).absolute()
    if "/" in named or os.path.lexists(folder):
        return folder
    if _ID.fullmatch(named) and (of_job := _of_job(named, runs)):
        return of_job
    names = [run.name for run in every(runs)]
    if named in names:
        return runs / named
    fitting = [name for name in names if name.startswith(named)]
    if len(fitting) == 1:
        return runs / fitting[0]
    raise _unclear(named, runs, names, sorted(fitting))


class Seen(NamedTuple):
    """A run, by one look into its folder: there are thousands in a list."""

    began: float
    """When its last attempt began; of one that has none, when its job was submitted."""
    folder: str
    attempts: list[int]


def seen(runs: Path) -> Iterator[Seen]:
    """The runs in a folder, in no order."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(runs) as entries:
        for entry in entries:
            folder, names = entry.path, list[str]()
            with suppress(OSError):  # of a link that leads in a circle, or to where this user may not look
                names = os.listdir(folder) if entry.is_dir() else []  # noqa: PTH208
            if (numbers := numbered(names)) or run_folder.JOB in names:
                yield Seen(_began(folder, numbers), folder, numbers)


def every(runs: Path) -> Iterator[Path]:
    """Their folders."""
    return (Path(run.folder) for run in seen(runs))


def newest_first(runs: Path) -> list[Path]:
    """As `find` takes the newest."""
    return [Path(run.folder) for run in sorted(seen(runs), reverse=True)]


def is_run(folder: Path) -> bool:
    """Whether it has an attempt, or a job that will begin one."""
    with suppress(OSError):
        return bool(attempts(folder)) or (folder / run_folder.JOB).exists()
    return False


def jobs(run: Path) -> list[int]:
    """The numbers of its jobs: of each attempt, the newest first, then the one that was submitted."""
    found = [job_of(run / run_folder.attempt(number)) for number in reversed(attempts(run))]
    return [job for job in dict.fromkeys([*found, _submitted(run)[0]]) if job]


def _submitted(run: Path) -> tuple[int, str]:
    """The job that was submitted, and its name if it is a task of an array."""
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        queued = json.loads(files.read(run / run_folder.JOB, limit=_MOST))
        number, task = int(queued["job"]), queued.get("task")
        return number, "" if task is None else f"{number}_{int(task)}"
    return 0, ""


def _tasks(run: Path) -> set[str]:
    """What Slurm calls its jobs that are tasks of arrays."""
    found = {str(id_of(run / run_folder.attempt(number))) for number in attempts(run)} | {_submitted(run)[1]}
    return {name for name in found if "_" in name}


def _of_job(named: str, runs: Path) -> Path | None:
    """The newest run of this job, or of this task of an array. An array has several runs, and none of them is meant."""
    if "_" in named:
        return next((run for run in newest_first(runs) if named in _tasks(run)), None)
    found = [run for run in newest_first(runs) if int(named) in jobs(run)][::-1]
    of_array = {task: run for run in found for task in _tasks(run) if task.startswith(f"{named}_")}
    if len(of_array) > 1 and found[-1] in of_array.values():
        tasks = sorted(of_array, key=lambda task: int(task.partition("_")[2]))
        shown = ", ".join(tasks[:_SHOWN]) + ", ..." * (len(tasks) > _SHOWN)
        raise ConfigError(
            "the job is an array, and each of its tasks is a run", where=runs, wanted="one task", found=named,
            fix=f"one of {shown}; dray scale --table STUDY shows them all",
        )  # fmt: skip
    return found[-1] if found else None


def job_of(attempt: Path | str) -> int:
    """The job that this attempt is in, by its folder; 0 without Slurm, or where that does not tell."""
    return _number(_facts(attempt))


def id_of(attempt: Path | str) -> int | str:
    """What Slurm calls that job: its number, or 12_3 where it is a task of an array."""
    facts = _facts(attempt)
    found = _TASK.search(facts)
    return found[1].decode() if found else _number(facts)


def cluster_of(attempt: Path | str) -> str:
    """What Slurm calls the cluster of its job; empty where its folder does not tell."""
    found = _CLUSTER.search(_facts(attempt))
    return found[1].decode(errors="replace") if found else ""


def _facts(attempt: Path | str) -> bytes:
    with suppress(OSError):
        return files.read(f"{attempt}/{run_folder.FACTS}", limit=_MOST)
    return b""


def _number(facts: bytes) -> int:
    found = _JOB.search(facts)
    return int(found[1]) if found else 0


def _began(folder: str, attempts: list[int]) -> float:
    """By a file that is written once: a shell in a run's container, or JupyterLab, changes the folders."""
    planned = [f"{folder}/{run_folder.attempt(attempts[-1])}/{run_folder.PLAN}"] if attempts else []
    for path in (*planned, f"{folder}/{run_folder.JOB}", folder):
        with suppress(OSError):
            return os.lstat(path).st_mtime
    return 0.0


def _newest(runs: Path) -> Path:
    found = max(seen(runs), default=None)
    if found is None:
        raise ConfigError(
            "there is no run",
            where=runs,
            wanted=f"a folder with run folders, each with {run_folder.attempt(1)} in it",
            found="none in it" if runs.is_dir() else "no folder",
            fix="name the `run folder:` of the run's last line, or --runs",
        )
    return Path(found.folder)


def _unclear(named: str, runs: Path, names: list[str], fitting: list[str]) -> ConfigError:
    wanted = "a run's folder, its name or the beginning of it, or the number of its job"
    if fitting:
        shown = ", ".join(fitting[:_SHOWN]) + ", ..." * (len(fitting) > _SHOWN)
        return ConfigError(
            "several runs begin like this", where=runs, wanted=wanted, found=f"{named!r}: {shown}", fix="add letters"
        )
    near = difflib.get_close_matches(named, names, n=1)
    fix = f"did you mean {near[0]}?" if near else "dray runs lists them; --runs names another folder"
    return ConfigError("there is no such run", where=runs, wanted=wanted, found=ascii(named), fix=fix)
