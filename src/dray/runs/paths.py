"""The folders of a run and its attempts; on the host this class owns every path in them."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import stat
import time
from functools import cached_property
from pathlib import Path

from dray.contract import run_folder as names
from dray.contract.findings import ConfigError

_ATTEMPT = re.compile(names.attempt("([1-9][0-9]{0,8})"))
_CHECKPOINT = re.compile("step-[0-9]{1,18}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class _In:
    """A name in an attempt's folder; the path is made only when needed, because lists have thousands of runs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, _owner: object) -> Path:
        return paths.folder / self._name


class RunPaths:
    """One attempt at a run: a folder of its own, beside the checkpoints that all attempts share."""

    plan = _In(names.PLAN)
    node_script = _In(names.NODE_SCRIPT)
    srun_options = _In(names.SRUN_OPTIONS)
    stop = _In(names.STOP)
    saved = _In(names.SAVED)
    process = _In(names.PROCESS)
    enter_script = _In(names.ENTER_SCRIPT)
    facts = _In(names.FACTS)
    secret = _In(names.SECRET)
    logs = _In(names.LOGS)
    failures = _In(names.FAILURES)
    preflight = _In(names.PREFLIGHT)
    preflight_report = _In(names.PREFLIGHT_REPORT)
    process_group = _In(names.PROCESS_GROUP)
    startup = _In(names.STARTUP)
    metrics = _In(names.METRICS)
    profile = _In(names.PROFILE)
    profile_trace = _In(names.PROFILE_TRACE)
    result = _In(names.RESULT)
    capsule = _In(names.CAPSULE)
    nodes = _In(names.NODES)
    source_diff = _In(names.SOURCE_DIFF)
    next = _In(names.NEXT)
    failing_nodes = _In(names.FAILING_NODES)

    def __init__(self, run: Path, attempt: int = 1) -> None:
        self.run, self.attempt = run, attempt

    @cached_property
    def folder(self) -> Path:
        """The attempt's own folder."""
        return self.run / names.attempt(self.attempt)

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, which all attempts share."""
        return self.run / names.CHECKPOINTS

    @property
    def final_model(self) -> Path:
        """The folder of the model, after the training has ended."""
        return self.checkpoints / names.FINAL_MODEL

    def node_log(self, node: int) -> Path:
        """The log of a node's runner and launcher."""
        return self.folder / names.node_log(node)

    def rank_log(self, rank: int) -> Path:
        """The log of a rank, with stdout and stderr."""
        return self.folder / names.rank_log(rank)

    def create(self, *, new: bool, share: str = "none") -> None:
        """Make the attempt's folder. Raises FileExistsError if it exists, or if a `new` run exists."""
        make_run_folder(self.run, new=new, share=share)
        self.folder.mkdir(mode=0o755)  # also with a umask that lets a group write
        for inner in (self.logs, self.failures, self.checkpoints):
            inner.mkdir(mode=0o755, exist_ok=True)


def run_name(name: str) -> str:
    """The name, if a run's folder, containers and network can have it; else ConfigError."""
    if name and not _NAME.fullmatch(name):
        raise ConfigError(
            "this is no valid name for a run",
            where="--run",
            wanted="at most 128 letters, digits, `.`, `_` and `-`; the first is a letter or a digit",
            found=ascii(name),
            fix="--run=NAME, and --runs=FOLDER for the folder above it",
        )
    return name


def run_named(runs: Path, word: str) -> Path | None:
    """The folder of the run that `--run` names, existing or not; None if `word` is empty."""
    if not word:
        return None
    folder = Path(word).absolute() if "/" in word else runs / run_name(word)
    run = folder.parent if _number(folder.name) else folder  # an attempt's folder stands for its run
    run_name(run.name or "/")
    return run


def make_run_folder(run: Path, *, new: bool = True, share: str = "none") -> None:
    """Make a run's folder, readable by this user alone, or by the group too (`share`).

    With share="group", the umask changes, so that the group can read all later files of this process and its children.
    """
    try:
        run.parent.mkdir(mode=0o775, parents=True, exist_ok=True)
        _require_kept(run.parent)
        run.mkdir(mode=names.MODES["none"], exist_ok=not new)
        for what, found in (("a folder", run.stat()), ("a link", run.lstat())):
            if found.st_uid != os.geteuid():
                raise ConfigError(
                    "the run folder belongs to another user, who could change what this run starts",
                    where=run,
                    wanted=f"a folder of user {os.geteuid()}",
                    found=f"{what} of user {found.st_uid}",
                    fix="choose another name (--run) or another folder (--runs)",
                )
        run.chmod(names.MODES[share] | run.stat().st_mode & stat.S_ISGID)
        if share == "group":
            os.umask((os.umask(0o077) & ~0o050) | 0o020)
    except OSError as error:
        if isinstance(error, FileExistsError) and run.is_dir():
            raise
        raise ConfigError(
            "the run folder cannot be created",
            where=run.parent,
            wanted="a folder where you may write, on a disk that all nodes share",
            found=error.strerror or error,
            fix="set DRAY_RUNS to such a folder, or use --runs=FOLDER",
        ) from error


def _require_kept(runs: Path) -> None:
    """Refuse a folder in which everybody may rename files: another user could replace a run.

    A folder that a group may write, as projects have, is allowed: the owner is checked before a run starts.
    """
    mode = runs.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        folder = shlex.quote(str(runs))
        raise ConfigError(
            "everybody may rename the folders of these runs, and put others in their place",
            where=runs,
            wanted="a folder that not everybody may write, or one with the sticky bit",
            found=f"mode {mode & 0o7777:04o}, of user {runs.stat().st_uid}",
            fix=f"chmod o-w {folder}; where it is not yours: mkdir -m 700 {folder}/$USER && export "
            f"DRAY_RUNS={folder}/$USER",
        )


def new_id(name: str, *, job: int = 0, now: float | None = None) -> str:
    """A new run name, which sorts by time and ends with the job number or, without Slurm, random letters."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{stamp}-{name}-{job or secrets.token_hex(3)}"


def of_job(runs: Path, name: str, job: int) -> list[str]:
    """The runs that this job started before it was requeued, newest first, because a new Slurm installation reuses job
    numbers."""
    pattern = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(name)}-{job}(-\d+)?")
    found = [path.name for path in runs.glob(f"*-{name}-{job}*") if pattern.fullmatch(path.name) and _own(path)]
    return sorted(found, reverse=True)


def _own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError as error:  # a broken link, or a folder that was removed meanwhile
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            raise
        return False


def attempts(run: Path) -> list[int]:
    """The attempt numbers of a run, in order."""
    try:
        return numbered(os.listdir(run))  # noqa: PTH208  of 5,000 runs
    except (FileNotFoundError, NotADirectoryError):
        return []


def numbered(names: list[str]) -> list[int]:
    """The attempt numbers among these file names, in order."""
    return sorted(filter(None, map(_number, names)))


def _number(name: str) -> int | None:
    """The attempt's number in a folder name; None if it is no attempt."""
    found = _ATTEMPT.fullmatch(name)
    return int(found[1]) if found else None


def next_attempt(run: Path) -> RunPaths:
    """The attempt after the newest."""
    return RunPaths(run, max(attempts(run), default=0) + 1)


def default_runs() -> Path:
    """The folder for run folders: DRAY_RUNS, else `runs` in the working directory."""
    return Path(os.environ.get("DRAY_RUNS") or "runs").absolute()


def attempt_at(folder: Path) -> RunPaths:
    """The attempt of this folder, whatever is in it; for a run's folder, the newest planned attempt."""
    number = _number(folder.absolute().name)
    return RunPaths(folder.absolute().parent, number) if number else newest_attempt(folder)


def last_attempt(folder: Path) -> RunPaths:
    """The attempt of this folder, or a run's last attempt, with or without a plan."""
    folder = folder.absolute()
    if number := _number(folder.name):
        if not os.path.lexists(folder):
            raise ConfigError(
                "the run has no such attempt",
                where=folder.parent,
                wanted=" or ".join(map(names.attempt, attempts(folder.parent)[-8:])),
                found=folder.name,
            )
        return RunPaths(folder.parent, number)
    found = attempts(folder) if folder.is_dir() else []
    return RunPaths(folder, found[-1]) if found else newest_attempt(folder)


def first_attempt(run: Path) -> RunPaths | None:
    """The first attempt of a run that was planned."""
    found = (RunPaths(run, number) for number in attempts(run))
    return next((paths for paths in found if paths.plan.is_file()), None)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; None if there is none. Raises OSError if the folder cannot be read."""
    found = [path for path in folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def newest_attempt(folder: Path) -> RunPaths:
    """The newest planned attempt of a run, or the attempt of this folder."""
    folder = folder.absolute()
    if (number := _number(folder.name)) and (folder / names.PLAN).is_file():
        return RunPaths(folder.parent, number)
    for attempt in reversed(attempts(folder)):
        if (paths := RunPaths(folder, attempt)).plan.is_file():
            return paths
    if (folder / names.JOB).exists():
        raise ConfigError(
            "the run has no attempt yet",
            where=folder,
            wanted="a run whose job has started",
            found=f"{names.JOB}, but no {names.attempt(1)}",
            fix=f"dray why {shlex.quote(str(folder))}",
        )
    raise ConfigError(
        "this is not a run folder",
        where=folder,
        wanted=f"a folder with {names.attempt(1)}/{names.PLAN} in it",
        found="a folder without it" if folder.is_dir() else "a file" if folder.exists() else "it does not exist",
        fix="give the `run folder:` that the run printed last; a job that is still in the queue has no plan yet",
    )
