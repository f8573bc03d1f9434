"""Another process that has a checkpoint folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

HOLD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from dray.train.checkpoint import lease
lease.BEAT_S = 0.05
one = lease.Lease(Path(sys.argv[1]), SimpleNamespace(**eval(sys.argv[2])))
one.acquire()
print("has it", flush=True)
sys.stdin.readline()
one.require()
one.release()
print("released", flush=True)
"""


def about(**other: Any) -> dict[str, Any]:
    return {"host_variable": "NODE", "job": 0, "run_folder": "/runs/one", "folder": "/nowhere", "attempt": 1} | other


class Other:
    """A process that has the folder until it is told."""

    def __init__(self, folder: Path, **other: Any) -> None:
        argv = [sys.executable, "-c", HOLD, str(folder), repr(about(**other))]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.said() == "has it"

    def said(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ended(self) -> str:
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        return self.said()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
