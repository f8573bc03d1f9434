"""Runs a group of checks in a process of its own: one that hangs, dies or prints does not harm the others."""

from __future__ import annotations

import importlib
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

from dray.checks import image
from dray.checks.check import failed, skipped
from dray.contract import exit_codes
from dray.contract.files import tail
from dray.contract.findings import Finding

_OUTPUT_LINES = 5
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


def run(module: str, scratch: Path, *, limit: float) -> Iterator[Finding]:
    """The results as they come, and one more if the group fails."""
    name = module.rpartition(".")[2]
    output = scratch / f"{name}.output"
    began = time.monotonic()
    with output.open("w+b") as file, _start(module, scratch, file.fileno()) as child:
        timer = threading.Timer(limit, _kill, (child.pid,))
        timer.start()
        try:
            for line in child.stdout or ():
                yield Finding(*json.loads(line))
            code = child.wait()
        finally:
            timer.cancel()
            _kill(child.pid)
    if code:
        ended = _end(code, time.monotonic() - began, limit)
        yield Finding(name, found="\n".join([ended, *tail(output, _OUTPUT_LINES)]), code=exit_codes.UNFIT)


def _start(module: str, scratch: Path, output: int) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603  our own interpreter and module
        [sys.executable, "-m", "dray.checks.group", module],
        stdout=subprocess.PIPE,
        stderr=output,
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
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def child(module: str) -> None:
    """Run the group in this process: print each result as a JSON line on stdout, all else on stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)  # libraries and compilers print what they like
        read = 0
        for result in _results(module):
            output = _output()
            lines = output[read:].decode("utf-8", "replace").rstrip().splitlines()[-_OUTPUT_LINES:]
            read = len(output)
            shown = result._replace(found="\n".join([result.found, *lines])) if result.code else result
            print(json.dumps(shown), file=results, flush=True)


def _results(module: str) -> Iterator[Finding]:
    """The results of a group; an exception is one too."""
    name = module.rpartition(".")[2]
    try:
        yield from importlib.import_module(module).results()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and image.absent(error.name):
            yield skipped(name, f"needs {error.name}, which is not installed")
        else:
            yield failed(name, error)


def _output() -> bytes:
    sys.stdout.flush()
    try:
        return os.pread(2, 1 << 24, 0)
    except OSError:  # a terminal: the user has seen it
        return b""


if __name__ == "__main__":
    child(sys.argv[1])
