"""Which run is meant: a folder, a run's name or its beginning, a job's number, or nothing, for the newest."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError
from dray.runs.paths import RunPaths, attempts, default_runs

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


def every(runs: Path) -> Iterator[Path]:
    """The runs in a folder, in no order."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(runs) as entries:
        yield from (Path(entry.path) for entry in entries if entry.is_dir() and is_run(Path(entry.path)))


def is_run(folder: Path) -> bool:
    """Whether it has an attempt, or a job that will begin one."""
    first = (folder / run_folder.attempt(1), folder / run_folder.JOB)
    with suppress(OSError):
        return any(path.exists() for path in first) or bool(attempts(folder))
    return False


def jobs(run: Path) -> list[int]:
    """The numbers of its jobs: of each attempt, the newest first, then the one that was submitted."""
    found = [job_of(RunPaths(run, number)) for number in reversed(attempts(run))]
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
    found = {str(id_of(RunPaths(run, number))) for number in attempts(run)} | {_submitted(run)[1]}
    return {name for name in found if "_" in name}


def _of_job(named: str, runs: Path) -> Path | None:
    """The newest run of this job, or of this task of an array. An array has several runs, and none of them is meant."""
    if "_" in named:
        return max((run for run in every(runs) if named in _tasks(run)), key=changed, default=None)
    found = sorted((run for run in every(runs) if int(named) in jobs(run)), key=changed)
    of_array = {task: run for run in found for task in _tasks(run) if task.startswith(f"{named}_")}
    if len(of_array) > 1 and found[-1] in of_array.values():
        tasks = sorted(of_array, key=lambda task: int(task.partition("_")[2]))
        shown = ", ".join(tasks[:_SHOWN]) + ", ..." * (len(tasks) > _SHOWN)
        raise ConfigError(
            "the job is an array, and each of its tasks is a run", where=runs, wanted="one task", found=named,
            fix=f"one of {shown}; dray scale --table STUDY shows them all",
        )  # fmt: skip
    return found[-1] if found else None


def job_of(attempt: RunPaths) -> int:
    """The job that this attempt is in; 0 without Slurm, or where its folder does not tell."""
    with suppress(OSError):
        return next(map(int, _JOB.findall(files.read(attempt.facts, limit=_MOST))), 0)
    return 0


def id_of(attempt: RunPaths) -> int | str:
    """What Slurm calls that job: its number, or 12_3 where it is a task of an array."""
    with suppress(OSError):
        if found := _TASK.search(files.read(attempt.facts, limit=_MOST)):
            return found[1].decode()
    return job_of(attempt)


def cluster_of(attempt: RunPaths) -> str:
    """What Slurm calls the cluster of its job; empty where its folder does not tell."""
    with suppress(OSError):
        found = _CLUSTER.search(files.read(attempt.facts, limit=_MOST))
        return found[1].decode(errors="replace") if found else ""
    return ""


def changed(run: Path) -> float:
    """When its last attempt began or ended, or its job was submitted."""
    numbers = attempts(run)
    newest = run / run_folder.attempt(numbers[-1]) if numbers else run
    with suppress(OSError):
        return newest.lstat().st_mtime
    return 0.0


def _newest(runs: Path) -> Path:
    found = list(every(runs))
    if not found:
        raise ConfigError(
            "there is no run",
            where=runs,
            wanted=f"a folder with run folders, each with {run_folder.attempt(1)} in it",
            found="none in it" if runs.is_dir() else "no folder",
            fix="name the `run folder:` of the run's last line, or --runs",
        )
    return max(found, key=changed)


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
