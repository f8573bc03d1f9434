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
"""Bytes of a diff that are kept."""
_SHOWN = 200  # names of untracked files
_SECONDS = 10.0  # a network disk that hangs must not hold up a run
# A repository's configuration may name programs. None of them runs: no file watcher, hook, diff program or filter;
# and git fetches and writes nothing.
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all")
_FILTER = ("clean=", "process=", "required=false")
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
    found: Source | None = None
    with suppress(DrayError, OSError, ValueError):
        if not process.which("git"):
            return None
        root = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
        if root.stat().st_uid != os.geteuid() or (root / ".git").stat().st_uid != os.geteuid():
            return None
        commit = _git(root, "rev-parse", "--verify", "HEAD").strip()
        branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD").strip()
        found = Source(folder=str(root), commit=commit, branch="" if branch == "HEAD" else branch)
    if found is None:
        return None
    diff = ""
    with suppress(DrayError, OSError, ValueError):  # if git is too slow, keep what is known
        diff, cut = _short(_redacted(_git(root, *_DIFF, quiet=_unfiltered(root))))
        found = found.model_copy(update={"changed": bool(diff), "cut": cut})
        names = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
        unknown = printable([secrets.redacted(name) for name in names if name][:_SHOWN])
        found = found.model_copy(update={"untracked": tuple(unknown)})
    return found, diff


def keep(run: Path, found: tuple[Source, str]) -> None:
    """Save the code's state in the run folder at submission, because dray's images have no git."""
    files.write_atomic(run / run_folder.SOURCE, found[0].model_dump_json(indent=1) + "\n", mode=0o600)
    files.write_atomic(run / run_folder.SOURCE_DIFF, found[1], mode=0o600)


def kept(run: Path) -> tuple[Source, str] | None:
    """The code's state that `keep` saved; None if there is none."""
    with suppress(OSError, ValueError):
        found = Source.model_validate_json(files.read(run / run_folder.SOURCE, limit=LIMIT))
        return found, files.read(run / run_folder.SOURCE_DIFF, limit=LIMIT).decode("utf-8", "replace")
    return None


def text(source: Source) -> str:
    """The code's state in one line."""
    branch = f" ({source.branch})" if source.branch else ""
    changed = (
        f", changed: {run_folder.SOURCE_DIFF}{', cut at 1 MiB' * source.cut}"
        if source.changed
        else ", changes unknown" * (source.changed is None)
    )
    unknown = f", {len(source.untracked)} untracked files" if source.untracked else ""
    return f"{source.commit[:12]}{branch} of {source.folder}{changed}{unknown}"


def _git(folder: Path, *argv: str, quiet: Sequence[str] = ()) -> str:
    return process.run(["git", "-C", folder, *quiet, *_QUIET, *argv], env=_ENV, seconds=_SECONDS).out


def _unfiltered(root: Path) -> list[str]:
    """Options that disable filters of the repository's own configuration; the user's own filters, such as LFS, stay."""
    argv = ("config", "--local", "--includes", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$")
    asked = process.run(["git", "-C", root, *_QUIET, *argv], env=_ENV, seconds=_SECONDS, check=False)
    names = {key.rpartition(".")[0] for key in asked.out.splitlines()}
    return [word for name in sorted(names) for key in _FILTER for word in ("-c", f"{name}.{key}")]


def _redacted(diff: str) -> str:
    names = [name for name, value in os.environ.items() if secrets.is_variable(name, value)]
    return secrets.redacted_code(diff, secrets.passed(names, os.environ))


def _short(diff: str) -> tuple[str, bool]:
    """The diff, cut after a whole line if it is too long, and whether it was cut."""
    data = diff.encode("utf-8", "replace")
    if len(data) <= LIMIT:
        return diff, False
    return data[:LIMIT].rpartition(b"\n")[0].decode("utf-8", "replace") + "\n", True
