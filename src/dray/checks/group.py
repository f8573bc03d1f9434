"""Start a group of checks; one that hangs, dies or writes rubbish does no harm to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dray.checks.result import Result, tail

# Everything that a check writes goes to the scratch folder.
_FOLDERS = (
    "CUDA_CACHE_PATH",
    "HF_HOME",
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "XDG_CACHE_HOME",
)
_SETTINGS = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no worker processes for one function
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # they double the time of the first function
}


def run(module: str, scratch: Path, *, limit: float) -> Iterator[Result]:
    """The results as they come, and one more if the group ends badly."""
    check = module.rpartition(".")[2]
    written = scratch / f"{check}.written"
    began = time.monotonic()
    with written.open("w+b") as file, _start(module, scratch, file.fileno()) as child:
        timer = threading.Timer(limit, _kill, (child.pid,))
        timer.start()
        try:
            for line in child.stdout or ():
                yield Result(**json.loads(line))
            code = child.wait()
        finally:
            timer.cancel()
            _kill(child.pid)
    if code:
        found = _end(code, time.monotonic() - began, limit)
        yield Result(check=check, state="FAIL", found=found, said=tail(written.read_bytes()))


def _start(module: str, scratch: Path, written: int) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603  our own interpreter and module
        [sys.executable, "-m", "dray.checks.child", module],
        stdout=subprocess.PIPE,
        stderr=written,
        text=True,
        env={**os.environ, **dict.fromkeys(_FOLDERS, str(scratch)), **_SETTINGS},
        start_new_session=True,
    )


def _kill(group: int) -> None:
    """The child and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _end(code: int, took: float, limit: float) -> str:
    if took >= limit:
        return f"not done after {limit:.0f} s"
    return f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
