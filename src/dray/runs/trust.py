"""Who owns a run, and which code of another user it would run here."""

from __future__ import annotations

import os
from collections.abc import Iterable

from dray.contract.findings import ConfigError
from dray.runs.store import RunPaths


def foreign(paths: RunPaths) -> str:
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
