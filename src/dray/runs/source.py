"""The user's code as git sees it: the commit, and the changes in the working tree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dray import process
from dray.contract import files, run_folder, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError

LIMIT = 1 << 20
"""Letters of a diff that are kept."""
_UNTRACKED = 200
_SECONDS = 10.0  # a network disk that hangs must not hold up a run
# A repository's configuration may name programs. None of them runs, and git fetches and writes nothing.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all")
_FILTERS = ("config", "--local", "--includes", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$")
_ENV = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_EXTERNAL_DIFF": "", "LC_ALL": "C.UTF-8"}


class Source(BaseModel):
    """The code that a run was started from."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    folder: str
    """The root of the working tree."""
    commit: str
    """The commit that was checked out."""
    branch: str = ""
    """The branch that was checked out; empty if none was."""
    changed: bool | None = None
    """Whether the working tree had changes, which source.diff contains; null if git took too long."""
    cut: bool = False
    """Whether source.diff is cut at 1 MiB."""
    untracked: tuple[str, ...] = ()
    """Untracked files, at most 200; their content is not recorded."""


def look(folder: Path) -> tuple[Source, str] | None:
    """The code in this folder and its diff; None if it is no git repository of this user."""
    found, diff = None, ""
    with suppress(DrayError, OSError, ValueError):  # if git is too slow, keep what is known
        root = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
        if {root.stat().st_uid, (root / ".git").stat().st_uid} != {os.geteuid()}:
            return None
        commit = _git(root, "rev-parse", "--verify", "HEAD").strip()
        branch = _git(root, "branch", "--show-current").strip()
        found = Source(folder=str(root), commit=commit, branch=branch)
        diff = _diff(root)
        found = found.model_copy(update={"changed": bool(diff), "cut": len(diff) > LIMIT})
        diff = diff[:LIMIT].rpartition("\n")[0] + "\n" if found.cut else diff
        names = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1][:_UNTRACKED]
        found = found.model_copy(update={"untracked": tuple(printable([secrets.redacted(name) for name in names]))})
    return (found, diff) if found else None


def _diff(root: Path) -> str:
    """The changes without secrets. Filters of the repository's own configuration do not run; the user's own, such as
    LFS, do."""
    options = []
    for key in _git(root, *_FILTERS, check=False).split():
        options += ["-c", f"{key}=", "-c", f"{key.rpartition('.')[0]}.required=false"]
    diff = _git(root, *_DIFF, options=options)
    names = [name for name, value in os.environ.items() if secrets.is_variable(name, value)]
    return secrets.redacted_code(diff, secrets.passed(names, os.environ))


def _git(folder: Path, *argv: str, options: Sequence[str] = (), check: bool = True) -> str:
    return process.run([*_GIT, "-C", folder, *options, *argv], env=_ENV, seconds=_SECONDS, check=check).out


def keep(run: Path, found: tuple[Source, str]) -> None:
    """Save the code's state in the run folder at submission, because dray's images have no git."""
    files.write_atomic(run / run_folder.SOURCE, found[0].model_dump_json(indent=1) + "\n", mode=0o600)
    files.write_atomic(run / run_folder.SOURCE_DIFF, found[1], mode=0o600)


def kept(run: Path) -> tuple[Source, str] | None:
    """The code's state that `keep` saved; None if there is none."""
    with suppress(OSError, ValueError):
        found = Source.model_validate_json(files.read(run / run_folder.SOURCE))
        return found, files.read(run / run_folder.SOURCE_DIFF).decode("utf-8", "replace")
    return None
