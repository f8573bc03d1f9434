"""Run folders: the paths in them, the files that dray reads from them, and how a run is found.

`Run` and `Attempt` read each file once: a value, or a warning if it is damaged. `plan_of` here and `result_of` in
runs/result.py are the strict readers.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from pydantic_core import from_json

from dray.contract import files
from dray.contract import run_folder as names
from dray.contract.findings import ConfigError, listed, nearest

if TYPE_CHECKING:
    from dray.planning.schema import Plan

VERSION = 1
"""The version of result.json."""
Table = dict[str, Any]
_ATTEMPT = re.compile(names.attempt("([1-9][0-9]{0,8})"))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_JOB_ID = re.compile("[0-9]{1,18}(_[0-9]{1,18})?")


class RunPaths:
    """The paths of one attempt: a folder of its own, beside the checkpoints that all attempts share.

    `plan` and the others have their names in contract/run_folder.py.
    """

    plan: Path
    node_script: Path
    srun_options: Path
    stop: Path
    saved: Path
    process: Path
    enter_script: Path
    facts: Path
    secret: Path
    logs: Path
    failures: Path
    preflight: Path
    preflight_report: Path
    process_group: Path
    startup: Path
    metrics: Path
    profile: Path
    profile_trace: Path
    result: Path
    capsule: Path
    nodes: Path
    source_diff: Path
    next: Path
    failing_nodes: Path

    def __init__(self, run: Path, attempt: int = 1) -> None:
        self.run, self.attempt = run, attempt
        self.folder = run / names.attempt(attempt)
        """The attempt's own folder."""

    def __getattr__(self, name: str) -> Path:
        if name not in RunPaths.__annotations__:
            raise AttributeError(name)
        path: Path = self.folder / getattr(names, name.upper())
        setattr(self, name, path)
        return path

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
        (self.run / names.SUMMARY).unlink(missing_ok=True)  # of an earlier attempt
        self.folder.mkdir(mode=0o755)  # also with a umask that lets a group write
        for inner in (self.logs, self.failures, self.checkpoints):
            inner.mkdir(mode=0o755, exist_ok=True)


class Queued(BaseModel):
    """The content of job.json: the job that `dray submit` put into the queue."""

    model_config = ConfigDict(frozen=True)

    job: PositiveInt
    task: NonNegativeInt | None = None
    """The task number, if the job is an array."""
    cluster: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]*$")] = ""
    """The cluster's name, if sbatch knows several."""
    time: float
    argv: list[str]
    stopped: float | None = None
    """When `dray stop` cancelled the job in the queue."""

    @property
    def id(self) -> str:
        """The id for Slurm's commands: 12, or 12_3."""
        return str(self.job) if self.task is None else f"{self.job}_{self.task}"


class Attempt:
    """One attempt at a run, as its files tell it."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.paths = RunPaths(run.folder, number)
        self._ended: float | None = None

    @property
    def ended(self) -> float | None:
        """When the result was written, valid or not; looked for again until it is there."""
        self._ended = self._ended or written(self.paths.result)
        return self._ended

    @property
    def result(self) -> Table | None:
        """result.json; None until it is written, and, with a warning, if it is damaged."""
        return None if self.ended is None else self._result

    @cached_property
    def _result(self) -> Table | None:
        return read_json(self.paths.result, self.run.warnings, require_version)

    @cached_property
    def plan(self) -> Table:
        """plan.json; empty without a plan."""
        return read_json(self.paths.plan, self.run.warnings) or {}

    @cached_property
    def began(self) -> float:
        """When the plan was written; while there is none, when the folder was changed."""
        return written(self.paths.plan) or written(self.paths.folder) or 0.0

    @cached_property
    def facts(self) -> dict[str, str]:
        """facts.txt; empty if it is missing."""
        with suppress(OSError):
            lines = files.read(self.paths.facts).decode(errors="replace").split("\n")
            return dict(line.partition("=")[::2] for line in lines)
        return {}

    @cached_property
    def nodes(self) -> list[str]:
        """The names of the planned nodes."""
        nodes = dig(self.plan, "world", "nodes")
        return [str(dig(node, "name")) for node in nodes] if isinstance(nodes, list) else []

    @cached_property
    def job_id(self) -> str:
        """The job's id for Slurm's commands: 12, or 12_3 for an array task; empty without Slurm."""
        return self.facts.get("task") or str(self.job or "")

    @cached_property
    def job(self) -> int:
        """The job's number; 0 without Slurm or if unknown."""
        number = self.facts.get("job", "")
        return int(number) if number.isdecimal() else 0

    @property
    def goes_on(self) -> bool:
        """Whether the same job continues: requeued, or with other nodes."""
        return bool(dig(self.result, "next", "requeue") or dig(self.result, "next", "spare"))


class Run:
    """A run folder. Each file is read once, when it is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.warnings: list[str] = []
        """What could not be read."""

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts, in order."""
        return [Attempt(self, number) for number in attempts(self.folder)]

    @property
    def last(self) -> Attempt | None:
        """The last attempt, planned or not; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @cached_property
    def job(self) -> Queued | None:
        """The submitted job; None if there is none, or, with a warning, if the file is damaged."""
        file = self.folder / names.JOB
        found = read_json(file, self.warnings)
        try:
            return None if found is None else Queued.model_validate(found)
        except ValidationError:
            self.warnings.append(f"{file} names no job")
            return None

    @cached_property
    def queued(self) -> Queued | None:
        """The submitted job, if it has not begun an attempt yet."""
        return self.job if self.job and self.job.id not in [attempt.job_id for attempt in self.attempts] else None

    @cached_property
    def cluster(self) -> str:
        """The cluster of this user's job, if sbatch knows several."""
        return self.job.cluster if self.job and self.owner == os.geteuid() else ""

    @cached_property
    def owner(self) -> int:
        """The user who owns the run."""
        with suppress(OSError):
            return os.lstat(self.last.paths.folder if self.last else self.folder).st_uid
        return os.geteuid()


def plan_of(paths: RunPaths) -> Plan:
    """The plan of an attempt; ConfigError if it is missing, damaged or of another version."""
    from dray.planning.schema import Plan  # noqa: PLC0415  half a second, for which no list of runs waits

    return load(
        Plan,
        paths.plan,
        "run's plan",
        fix=f"start an attempt with a new plan: dray run RECIPE --run={shlex.quote(str(paths.run))}",
    )


# Files -----------------------------------------------------------------------------------------------------------


def read_json(path: Path | str, warnings: list[str], check: Callable[[Table], None] = lambda _: None) -> Table | None:
    """The file's JSON object; None if the file is missing, or, with a warning, if it cannot be read."""
    try:
        found = from_json(files.read(path))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        check(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.append(f"{path} cannot be read: {reason(error)}")
        return None
    return found


def require_version(result: object) -> None:
    """Raise ValueError if the result has another version."""
    version = result.get("version", VERSION) if isinstance(result, dict) else None
    if version != VERSION:
        raise ValueError(f"result version {ascii(version)[:40]}, but this dray reads {VERSION}")


Model = TypeVar("Model", bound=BaseModel)


def load(model: type[Model], path: Path, noun: str, *, fix: str = "") -> Model:
    """The content of a file of dray's own; ConfigError if it is missing, damaged or of another version."""
    text = files.text(path, f"the {noun}", fix=fix)
    try:
        return model.model_validate_json(text)
    except ValidationError as wrong:
        from dray.config.load_toml import explained  # noqa: PLC0415  a tenth of the time of `dray runs`

        raise ConfigError(
            f"the {noun} is damaged, or of another version of dray", where=path, found=explained(wrong), fix=fix
        ) from wrong


def dig(value: Any, *keys: str) -> Any:  # noqa: ANN401  any JSON value
    """The value at a path of keys in nested tables; None if it is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def written(path: Path | str) -> float | None:
    """When the file was last written; None if it is missing."""
    try:
        return os.lstat(path).st_mtime
    except (OSError, ValueError):
        return None


def reason(error: Exception) -> str:
    """The error in one line."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return " ".join((text or type(error).__name__).split())[:300]


# Names and folders of runs -----------------------------------------------------------------------------------------


def default_runs() -> Path:
    """The folder for run folders: DRAY_RUNS, else `runs` in the working directory."""
    return Path(os.environ.get("DRAY_RUNS") or "runs").absolute()


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


def new_id(name: str, *, job: int = 0, now: float | None = None) -> str:
    """A new run name, which sorts by time and ends with the job number or, without Slurm, random letters."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{stamp}-{name}-{job or secrets.token_hex(3)}"


def of_job(runs: Path, name: str, job: int) -> list[str]:
    """This user's runs that the job started before it was requeued, newest first, because a new Slurm installation
    reuses job numbers. OSError if the disk does not answer: it may hold such a run."""
    pattern = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(name)}-{job}(-\d+)?")
    found = []
    for run in runs.glob(f"*-{name}-{job}*"):
        with suppress(FileNotFoundError, PermissionError):
            if pattern.fullmatch(run.name) and run.stat().st_uid == os.geteuid():
                found.append(run.name)
    return sorted(found, reverse=True)


def make_run_folder(run: Path, *, new: bool = True, share: str = "none") -> None:
    """Make a run's folder, readable by this user alone, or by the group too (`share`).

    With share="group", the umask changes, so that the group can read all later files of this process and its children.
    """
    try:
        run.parent.mkdir(mode=0o775, parents=True, exist_ok=True)
        _require_kept(run.parent)
        run.mkdir(mode=names.MODES["none"], exist_ok=not new)
        others = {run.stat().st_uid, run.lstat().st_uid} - {os.geteuid()}  # a folder, or a link to one
        if others:
            raise ConfigError(
                "the run folder belongs to another user, who could change what this run starts",
                where=run,
                wanted=f"a folder of user {os.geteuid()}",
                found=f"a folder or a link of user {others.pop()}",
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


def require_own(folder: Path) -> Path:
    """The run of this folder, or of this attempt's folder. Another user's run is refused: it may name any program."""
    run = folder if is_run(folder) else last_attempt(folder).run
    last = Run(run).last
    for path in (run, *([last.paths.folder] if last else [])):
        try:
            found, is_own = path.lstat(), files.is_own(path)
        except OSError as refused:  # for example a broken link
            raise ConfigError("the run cannot be read", where=path, found=refused.strerror) from refused
        if found.st_uid != os.geteuid() or not is_own:
            raise ConfigError(
                "the run belongs to another user, or others may write into it",
                where=path,
                wanted=f"a folder of user {os.geteuid()}",
                found=f"of user {found.st_uid}, mode {found.st_mode & 0o7777:04o}",
            )
    return run


# Attempts ----------------------------------------------------------------------------------------------------------


def attempts(run: Path | str) -> list[int]:
    """The attempt numbers of a run, in order."""
    try:
        return sorted(filter(None, map(_number, os.listdir(run))))  # noqa: PTH208  of 5,000 runs
    except (FileNotFoundError, NotADirectoryError):
        return []


def _number(name: str) -> int | None:
    """The attempt's number in a folder name; None if it is no attempt."""
    found = _ATTEMPT.fullmatch(name)
    return int(found[1]) if found else None


def next_attempt(run: Path) -> RunPaths:
    """The attempt after the newest."""
    return RunPaths(run, max(attempts(run), default=0) + 1)


def attempt_at(folder: Path) -> RunPaths:
    """The attempt of this folder, even one that was deleted meanwhile; for a run's folder, the newest planned one."""
    number = _number(folder.name)
    return RunPaths(folder.absolute().parent, number) if number else newest_attempt(folder)


def last_attempt(folder: Path) -> RunPaths:
    """The attempt of this folder, or a run's last attempt, with or without a plan."""
    return _attempt(folder, planned=False)


def newest_attempt(folder: Path) -> RunPaths:
    """The attempt of this folder, or a run's newest attempt, with a plan."""
    return _attempt(folder, planned=True)


def _attempt(folder: Path, *, planned: bool) -> RunPaths:
    folder = folder.absolute()
    number = _number(folder.name)
    run = folder.parent if number else folder
    for attempt in reversed(Run(run).attempts):
        if number in (None, attempt.number) and (not planned or attempt.paths.plan.is_file()):
            return attempt.paths
    raise ConfigError(
        "the run has no such attempt" if is_run(run) else "this is not a run folder",
        where=folder,
        wanted=listed(map(names.attempt, attempts(run))) or f"a folder with {names.attempt(1)}/{names.PLAN} in it",
        found="a folder without it" if folder.is_dir() else "a file" if folder.exists() else "it does not exist",
        fix=f"dray why {shlex.quote(str(run))}" if is_run(run) else "give the `run folder:` that the run printed last",
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; None if there is none. Raises OSError if the folder cannot be read."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def node_number(nodes: Sequence[str], word: str) -> int:
    """The number of the node with this number or name."""
    numbers = [str(number) for number in range(max(1, len(nodes)))]
    for known in (nodes, numbers):
        if word in known:
            return known.index(word)
    raise ConfigError(
        "the run has no such node",
        where="--node",
        wanted=f"a number from 0 to {numbers[-1]}, or the name of a node: {listed(nodes)}",
        found=ascii(word),
    )


# Finding a run -----------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Whether the folder has an attempt, or a job that will begin one."""
    with suppress(OSError):
        return bool(attempts(folder)) or (folder / names.JOB).exists()
    return False


def _began(folder: str) -> float | None:
    """When the run's last attempt began, or its job was submitted; None if it is no run.

    Each time is that of a file that is written once; the folder's own time changes with dray enter.
    """
    if at := written(f"{folder}/{names.SUMMARY}"):
        return at
    with suppress(OSError):  # a circular link, or a folder that this user may not read
        last = names.attempt(max(attempts(folder), default=0))
        times = [written(f"{folder}/{name}") for name in (f"{last}/{names.PLAN}", last, names.JOB)]
        return next(filter(None, times), None)
    return None


def newest_first(runs: Path) -> Iterator[Path]:
    """The folders of all runs, newest first."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(runs) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and (began := _began(entry.path)) is not None:
                found.append((began, entry.path))
    return (Path(folder) for _, folder in sorted(found, reverse=True))


def find(word: str = "", runs: Path | None = None) -> Path:
    """The folder of a run by its path, name, the beginning of its name, or its job; the newest without a word.

    An attempt's folder if that was named.
    """
    runs = (runs or default_runs()).absolute()
    if word and ("/" in word or os.path.lexists(word)):
        return Path(word).absolute()
    known = [*newest_first(runs)]
    if known and not word:
        return known[0]
    if runs / word in known:
        return runs / word
    fitting = [run for run in known if run.name.startswith(word)]
    if len(fitting) == 1:
        return fitting[0]
    if _JOB_ID.fullmatch(word):  # to find a job, files of every run are read
        for folder in known:
            run = Run(folder)
            if word in [attempt.job_id for attempt in run.attempts] or (run.job and run.job.id == word):
                return folder
    problem, fix = "there is no such run" if word else "there are no runs", "dray runs lists them"
    if fitting:
        problem, fix = "several runs begin with this name", "type more letters"
    elif near := nearest(word, [run.name for run in known]):
        fix = f"type {near}, if you mean it"
    raise ConfigError(
        problem,
        where=runs,
        wanted="a run's folder, its name or the beginning of it, or its job: 12, or 12_3 for a task of an array",
        found=listed(sorted(run.name for run in fitting)) or (ascii(word) if word else ""),
        fix=f"{fix}; --runs=FOLDER names another folder",
    )


# Another user's run --------------------------------------------------------------------------------------------------


def foreign_path(paths: RunPaths) -> str:
    """The part of a run that another user owns or may write, in words; empty if only this user and root do."""
    for path in (paths.run, paths.folder, paths.plan, paths.capsule):
        if not path.exists():
            continue
        found = path.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            return f"{path} of user {found.st_uid}, mode {found.st_mode & 0o7777:04o}"
    return ""


def require_no_functions(maps: Iterable[tuple[str, str]], where: str) -> None:
    """Refuse to evaluate another user's run with its row functions, which run wherever datasets are read."""
    code = [f"{key}: {text.partition(chr(10))[0]}" for key, text in sorted(maps)]
    if code:
        raise ConfigError(
            "you did not record this run here, and an evaluation runs code that it names",
            where=where,
            wanted="--trust-run, after you have read that code",
            found="\n".join(code),
            fix="add --trust-run to the command",
        )
