"""Find a run by its folder, its name or the beginning of it, or a job number; by default the newest run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError, listed, nearest
from dray.runs import queued
from dray.runs.paths import attempts, default_runs, numbered

_ID = re.compile("[0-9]{1,18}(_[0-9]{1,18})?")
_JOB = re.compile(rb"^job=([0-9]{1,18})$", re.MULTILINE)
_TASK = re.compile(rb"^task=([0-9]{1,18}_[0-9]{1,18})$", re.MULTILINE)
_CLUSTER = re.compile(rb"^cluster=(.+)$", re.MULTILINE)
_DATE = re.compile(r"20\d{6}")


def find(named: str = "", runs: Path | None = None) -> Path:
    """The folder of a run, or of an attempt if that was named."""
    runs = (runs or default_runs()).absolute()
    if not named:
        return _newest(runs)
    folder = Path(named).absolute()
    if "/" in named or os.path.lexists(folder):
        return folder
    names = [run.name for run in every(runs)]
    fitting = [name for name in names if name.startswith(named)]
    # To find a job, the facts of every attempt are read; a name begins with its date.
    is_date = _DATE.fullmatch(named) and fitting
    if _ID.fullmatch(named) and not is_date and (of_job := _of_job(named, runs)):
        return of_job
    if named in names:
        return runs / named
    if len(fitting) == 1:
        return runs / fitting[0]
    raise _unclear(named, runs, names, sorted(fitting))


class Seen(NamedTuple):
    """A run, from one listing of its folder: a list has thousands of runs."""

    began: float
    """When the last attempt began, or, without one, when the job was submitted."""
    folder: str
    attempts: list[int]


def seen(runs: Path) -> Iterator[Seen]:
    """The runs in a folder, unordered."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(runs) as entries:
        for entry in entries:
            folder, names = entry.path, list[str]()
            with suppress(OSError):  # a circular link, or a folder that this user may not read
                names = os.listdir(folder) if entry.is_dir() else []  # noqa: PTH208
            if (numbers := numbered(names)) or run_folder.JOB in names:
                yield Seen(_began(folder, numbers), folder, numbers)


def every(runs: Path) -> Iterator[Path]:
    """The folders of all runs, unordered."""
    return (Path(run.folder) for run in seen(runs))


def newest_first(runs: Path) -> list[Path]:
    """The folders of all runs, newest first."""
    return [Path(run.folder) for run in sorted(seen(runs), reverse=True)]


def is_run(folder: Path) -> bool:
    """Whether the folder has an attempt, or a job that will begin one."""
    with suppress(OSError):
        return bool(attempts(folder)) or (folder / run_folder.JOB).exists()
    return False


def jobs(run: Path) -> list[int]:
    """The run's job numbers: of each attempt, newest first, then of the submitted job."""
    found = [job_of(run / run_folder.attempt(number)) for number in reversed(attempts(run))]
    submitted = queued.read(run)
    return [job for job in dict.fromkeys([*found, submitted.job if submitted else 0]) if job]


def _tasks(run: Path) -> set[str]:
    """The run's array tasks, as 12_3."""
    submitted = queued.read(run)
    found = [id_of(run / run_folder.attempt(number)) for number in attempts(run)]
    return {name for name in map(str, [*found, submitted.id if submitted else ""]) if "_" in name}


def _of_job(named: str, runs: Path) -> Path | None:
    """The newest run of this job or array task. The number of a whole array is refused: it has several runs."""
    if "_" in named:
        return next((run for run in newest_first(runs) if named in _tasks(run)), None)
    found = [run for run in newest_first(runs) if int(named) in jobs(run)][::-1]
    of_array = {task: run for run in found for task in _tasks(run) if task.startswith(f"{named}_")}
    if len(of_array) > 1 and found[-1] in of_array.values():
        tasks = sorted(of_array, key=lambda task: int(task.partition("_")[2]))
        raise ConfigError(
            "the job is an array, and each task is a run", where=runs, wanted=f"one task: {listed(tasks)}",
            found=named, fix="dray scale --table STUDY shows all tasks",
        )  # fmt: skip
    return found[-1] if found else None


def node_number(names: Sequence[str], word: str) -> int:
    """The number of the node with this number or name."""
    if word in names:
        return names.index(word)
    last = max(1, len(names)) - 1
    if re.fullmatch("[0-9]{1,7}", word) and int(word) <= last:
        return int(word)
    wanted = f"a number from 0 to {last}" if last else "0"
    if names:
        wanted += f", or one of {listed(names)}"
    raise ConfigError("the run has no such node", where="--node", wanted=wanted, found=ascii(word))


def job_of(attempt: Path | str) -> int:
    """The attempt's job number, from its folder; 0 without Slurm or if unknown."""
    return _number(_facts(attempt))


def id_of(attempt: Path | str) -> int | str:
    """The job's id in Slurm: its number, or 12_3 for an array task."""
    facts = _facts(attempt)
    found = _TASK.search(facts)
    return found[1].decode() if found else _number(facts)


def cluster_of(attempt: Path | str) -> str:
    """The cluster of the attempt's job; empty if unknown."""
    found = _CLUSTER.search(_facts(attempt))
    return found[1].decode(errors="replace") if found else ""


def _facts(attempt: Path | str) -> bytes:
    with suppress(OSError):
        return files.read(f"{attempt}/{run_folder.FACTS}")
    return b""


def _number(facts: bytes) -> int:
    found = _JOB.search(facts)
    return int(found[1]) if found else 0


def _began(folder: str, attempts: list[int]) -> float:
    """The time of a file that is written once; the folder's own time changes with dray enter or JupyterLab."""
    planned = [f"{folder}/{run_folder.attempt(attempts[-1])}/{run_folder.PLAN}"] if attempts else []
    for path in (*planned, f"{folder}/{run_folder.JOB}", folder):
        with suppress(OSError):
            return os.lstat(path).st_mtime
    return 0.0


def _newest(runs: Path) -> Path:
    found = max(seen(runs), default=None)
    if found is None:
        raise ConfigError(
            "there are no runs",
            where=runs,
            wanted=f"a folder of run folders, each with {run_folder.attempt(1)} in it",
            found="no run folder" if runs.is_dir() else "the folder does not exist",
            fix="give the `run folder:` that the run printed last, or --runs=FOLDER",
        )
    return Path(found.folder)


def _unclear(named: str, runs: Path, names: list[str], fitting: list[str]) -> ConfigError:
    wanted = "a run's folder, its name or the beginning of it, or the number of its job"
    if fitting:
        return ConfigError(
            "several runs begin with this name", where=runs, wanted=wanted, found=f"{named!r}: {listed(fitting)}",
            fix="type more letters",
        )  # fmt: skip
    near = nearest(named, names)
    fix = f"did you mean {near}?" if near else "dray runs lists them; --runs=FOLDER names another folder"
    return ConfigError("there is no such run", where=runs, wanted=wanted, found=ascii(named), fix=fix)
