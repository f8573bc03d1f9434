"""The user's code as git sees it: the commit, and the changes in the working tree."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dray import process
from dray.contract import files, run_folder, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError

LIMIT = 1 << 20
"""Letters of a diff; a longer one is not kept."""
_UNTRACKED = 200
_SECONDS = 10.0  # a network disk that hangs must not hold up a run
# No program that a repository's configuration names runs, and git fetches and writes nothing.
_GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all")
_ENV = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


class Source(BaseModel):
    """The code that a run was started from."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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


def look(folder: Path) -> tuple[Source, str] | None:
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
    return (found, diff if len(diff) <= LIMIT else "") if found else None


def _git(folder: Path | str, *argv: str) -> str:
    return process.run([*_GIT, "-C", folder, *argv], env=_ENV, seconds=_SECONDS).out


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
