"""`python -m dray.checks.child MODULE`: one group of checks in its own process, a JSON line a result."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

from dray.checks import stack
from dray.checks.result import Result, failed, tail


def main(module: str) -> None:
    """Tell each result on what was stdout; group.run has made stderr a file."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as told:
        os.dup2(2, 1)  # libraries and compilers print what they like
        heard = 0
        for result in _results(module):
            written = _written()
            said = tail(written[heard:]) if result.state == "FAIL" else None
            heard = len(written)
            print(json.dumps(asdict(replace(result, said=said))), file=told, flush=True)


def _results(module: str) -> Iterator[Result]:
    """Whatever goes wrong is a result too."""
    check = module.rpartition(".")[2]
    try:
        yield from importlib.import_module(module).results()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and stack.absent(error.name):
            yield Result(check=check, state="skip", found=f"needs {error.name}, which is not here")
        else:
            yield failed(check, error)


def _written() -> bytes:
    sys.stdout.flush()
    try:
        return os.pread(2, 1 << 24, 0)
    except OSError:  # a terminal: who looks has seen it
        return b""


if __name__ == "__main__":
    main(sys.argv[1])
