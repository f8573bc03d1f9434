"""What stopped this node or this rank, as a file that outlives it."""

from __future__ import annotations

import json
import os
import sys
import time


class Refusal(Exception):  # noqa: N818  it refuses; nothing is in error
    """The launch must not go on; the code is dray's contract (78 configuration, 69 unfit, 75 try again)."""

    def __init__(
        self,
        code: int,
        why: str,
        *,
        wanted: str,
        found: str,
        fix: str,
        recorded: bool = False,
        node: str = "",
        rank: int | None = None,
    ) -> None:
        self.code = code
        self.node, self.rank = node, rank  # who is to blame, where that is another than who noticed
        self.recorded = recorded  # another node has written down the same
        super().__init__(f"{why}\n  wanted: {wanted}\n  found:  {found}\n  fix:    {fix}")


def write(folder: str, name: str, **fields: object) -> None:
    """failures/NAME.json, whole or not there. A disk that is full must not hide the exit code as well."""
    target = f"{folder}/failures/{name}.json"
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(f"{target}.part", "w", encoding="utf-8") as part:
            json.dump({"time": time.time(), **fields}, part, indent=1)
            part.flush()
            os.fsync(part.fileno())
        os.replace(f"{target}.part", target)
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


def tail(path: str, lines: int = 20) -> list[str]:
    """The last lines of a log."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 16384))
            return log.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []
