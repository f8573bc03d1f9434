"""capsule.json: what repeats an attempt, beside its plan: the user's code, and what only nodes and trainer know.

The code is written when the attempt is planned; the rest when it has ended.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dray import process
from dray.contract import files, run_folder, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError
from dray.planning.schema import Plan
from dray.runs.metrics import first
from dray.runs.result import Result
from dray.runs.store import RunPaths, load, reason


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Node(_Model):
    """A node, as its runner recorded it."""

    node: Annotated[int, Field(ge=0)]
    """The node's number in the run, from 0."""
    name: str
    """Its name in Slurm or in the hostfile."""
    host: str = ""
    """The host name that the node itself has."""
    cpu: str = ""
    """The processor's model."""
    cpus: int = 0
    """Logical processors of the machine."""
    usable_cpus: str = ""
    """The processors that the run was allowed to use."""
    cores_of_ranks: str = ""
    """The processors that each rank was bound to; empty without binding."""
    threads: int | None = None
    """OMP_NUM_THREADS of each rank."""
    numa: tuple[str, ...] = ()
    """The processors of each NUMA node."""
    memory_gb: float | None = None
    """Memory of the machine, in GB."""
    kernel: str = ""
    """Name and version of its kernel."""
    libc: str = ""
    """The C library that the runner's Python uses, with its version."""
    python: str = ""
    """Version of the runner's Python."""
    gpus: tuple[str, ...] = ()
    """Models of the machine's GPUs."""
    driver: str = ""
    """Version of the GPUs' kernel module."""
    packages: dict[str, str] = {}
    """Versions of the Python packages; of the first node alone."""


class Source(_Model):
    """The code that a run was started from."""

    folder: str
    """The root of the working tree."""
    commit: str
    """The commit that was checked out."""
    branch: str = ""
    """The branch that was checked out; HEAD if none was."""
    diff_sha256: str = ""
    """SHA-256 of the changes in the working tree, without secrets; empty without changes, or if git took too long."""
    untracked: tuple[str, ...] = ()
    """Untracked files, at most 200; their content is not recorded."""


class Capsule(_Model):
    """One attempt at a run."""

    version: Literal[1] = 1
    """Version of the capsule's format; dray reads only this one."""
    finished: str | None = None
    """When its result was written; null until then."""
    source: Source | None = None
    """The user's own code; null if the folder of the command or the recipe is not in a git repository."""
    torch: str = ""
    """Version of torch, as the trainer saw it."""
    nodes: tuple[Node, ...] = ()
    """The nodes that took part, by number."""
    data: dict[str, str] = {}
    """SHA-256 of each dataset's tokens; for a stream, a text that identifies it."""
    preflight: str | None = None
    """What the nodes proved before the launch, in a line."""


class _Start(BaseModel):
    """What the trainer logs at its start."""

    torch: str = ""
    data: dict[str, str] = {}


def begun(paths: RunPaths, plan: Plan, beside: Path | None) -> None:
    """Write the capsule of a planned attempt, after all files that a node needs. `beside` is the recipe's folder."""
    folder = Path(plan.recipe.command.folder) if plan.recipe.command else beside
    _write(paths, Capsule(), find_source(folder) if folder else None)


def ended(paths: RunPaths, plan: Plan | None, result: Result) -> str:
    """Add what nodes, trainer and result tell; the error in one line, empty if there was none."""
    if plan is None:
        return ""
    try:
        made = _seen(paths, of(paths))
        made = made.model_copy(update={"finished": result.finished, "preflight": result.preflight})
        _write(paths, made, None if made.source else kept_source(paths.run))
    except Exception as error:  # the result is printed whatever is in the run folder
        return f"{paths.capsule} cannot be written: {reason(error)}"
    return ""


def _write(paths: RunPaths, made: Capsule, code: tuple[Source, str] | None) -> None:
    """Write the capsule, with the user's code as git sees it now, or as it was when the run was submitted."""
    if code:
        made = made.model_copy(update={"source": code[0]})
        if code[1]:
            files.write_atomic(paths.source_diff, code[1], mode=0o600)
    files.write_atomic(paths.capsule, made.model_dump_json(indent=1) + "\n")


def of(paths: RunPaths) -> Capsule:
    """The capsule, with what is known so far of an active run."""
    made = read(paths) if paths.capsule.exists() else Capsule()
    return made if made.finished else _seen(paths, made)


def read(paths: RunPaths) -> Capsule:
    """The capsule of an attempt; ConfigError if it is missing, damaged or of another version."""
    return load(Capsule, paths.capsule, "run's capsule", fix="name an attempt that has one: RUN/attempt-N")


def _seen(paths: RunPaths, made: Capsule) -> Capsule:
    """The capsule with what nodes and trainer have written so far."""
    nodes = []
    for path in paths.nodes.glob("node-*.json"):
        with suppress(OSError, ValueError):  # a damaged record leaves the others
            nodes.append(Node.model_validate_json(files.read(path)))
    made = made.model_copy(update={"nodes": tuple(sorted(nodes, key=lambda node: node.node))})
    with suppress(OSError, ValueError):  # the trainer has not begun, or the run is a command
        start = _Start.model_validate(first(paths.metrics))
        made = made.model_copy(update={"torch": start.torch, "data": start.data})
    return made


# The user's code -----------------------------------------------------------------------------------------------------

DIFF_LIMIT = 1 << 20
"""Letters of a diff; a longer one is not kept."""
_UNTRACKED = 200
_GIT_S = 10.0  # a network disk that hangs must not hold up a run
# No program that a repository's configuration names runs, and git fetches and writes nothing.
_GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all")
_GIT_ENV = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


def find_source(folder: Path) -> tuple[Source, str] | None:
    """The code in this folder and its diff; None if it is no git repository of this user."""
    found, diff = None, ""
    with suppress(DrayError, OSError, ValueError):  # if git is too slow, keep what is known
        root, commit, branch = _git(folder, "rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD").splitlines()
        if {Path(root).stat().st_uid, Path(root, ".git").stat().st_uid} != {os.geteuid()}:
            return None
        found = Source(folder=root, commit=commit, branch=branch)
        diff = secrets.redacted_code(_git(root, *_DIFF), secrets.of_environment())
        digest = hashlib.sha256(diff.encode("utf-8", "replace")).hexdigest() if diff else ""
        names = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1][:_UNTRACKED]
        untracked = tuple(printable([secrets.redacted(name) for name in names]))
        found = found.model_copy(update={"diff_sha256": digest, "untracked": untracked})
    return (found, diff if len(diff) <= DIFF_LIMIT else "") if found else None


def _git(folder: Path | str, *argv: str) -> str:
    return process.run([*_GIT, "-C", folder, *argv], env=_GIT_ENV, seconds=_GIT_S).out


def keep_source(run: Path, found: tuple[Source, str]) -> None:
    """Save the code's state in the run folder at submission, because dray's images have no git."""
    files.write_atomic(run / run_folder.SOURCE, found[0].model_dump_json(indent=1) + "\n", mode=0o600)
    files.write_atomic(run / run_folder.SOURCE_DIFF, found[1], mode=0o600)


def kept_source(run: Path) -> tuple[Source, str] | None:
    """The code's state that `keep_source` saved; None if there is none."""
    with suppress(OSError, ValueError):
        found = Source.model_validate_json(files.read(run / run_folder.SOURCE))
        return found, files.read(run / run_folder.SOURCE_DIFF).decode("utf-8", "replace")
    return None
