"""What may be in the place of a file of a run folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

RECORD = {"time": 10.0, "node": "n2", "rank": 3, "code": 3, "why": "exit code 3", "log": "l", "last_lines": ["x"]}


def replace(path: Path, content: bytes | str | Callable[[Path], object]) -> None:
    """With bytes, a link that leads there, or whatever the function makes in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    elif isinstance(content, str):
        path.symlink_to(content)
    else:
        path.write_bytes(content)


DEEP = b"[" * 100000
HOSTILE: dict[str, bytes | str | Callable[[Path], object]] = {
    "empty": b"",
    "half": b'{"time": 10.0, "no',
    "an empty table": b"{}",
    "no table": b"[1, null]",
    "NUL": b"\0" * 4096 + b"\n",
    "UTF-16": json.dumps(RECORD).encode("utf-16"),
    "Latin-1": b'{"why": "\xe9"}\n',
    "deep": DEEP,
    "5,000 digits": b'{"time": ' + b"9" * 5000 + b', "step": ' + b"9" * 5000 + b', "event": "step"}\n',
    "other kinds": b'{"time": "x", "event": ["step"], "version": [], "rank": {}, "code": "y", "step": {}}\n',
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a loop": "loop",
    "a device": "/dev/zero",
    "nothing": lambda path: None,
}  # fmt: skip
