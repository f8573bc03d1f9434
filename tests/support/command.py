"""The command `dray` in a process of its own, by a fork of a process that has imported all verbs: it costs a tenth."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers import PYTHON, ROOT

ENV = {**PYTHON, "DRAY_HOME": str(ROOT), "HOME": "/nonexistent", "SLURM_CLUSTER_NAME": ""}
_MAIN = ROOT / "src" / "dray" / "__main__.py"
_PROCESSES = multiprocessing.get_context("forkserver")
# Verbs import the rest as they start.
_FILES = [file for room in ("cli", "fitness", "remote", "runs") for file in (_MAIN.parent / room).rglob("[a-z]*.py")]
_MODULES = [".".join(("dray", *file.relative_to(_MAIN.parent).with_suffix("").parts)) for file in _FILES]
_PROCESSES.set_forkserver_preload(["__main__", *_MODULES, "dray.planning.plan", "rich.live"])


def dray(
    *words: str | Path,
    cwd: Path | str = ROOT,
    umask: int = 0o022,
    stdin: bytes = b"",
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run `dray WORDS` with ENV and `env` alone. Its output is a file, and no terminal."""
    argv = [os.fspath(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        files[0].write_bytes(stdin)
        process = _PROCESSES.Process(target=_become, args=(argv, os.fspath(cwd), ENV | env, umask, files))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(argv, 300)
        out, err = (file.read_text() for file in files[1:])
    return subprocess.CompletedProcess(argv, process.exitcode, out, err)


def _become(argv: list[str], cwd: str, env: dict[str, str], umask: int, files: list[Path]) -> None:
    from dray import cli

    for number, file in enumerate(files):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(file, flags, 0o600), number)
    streams: Any = [os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False) for number in range(3)]
    sys.stdin, sys.stdout, sys.stderr = streams
    os.environ.clear()
    os.environ.update(env)
    os.umask(umask)
    os.chdir(cwd)
    sys.argv = [str(_MAIN), *argv]
    cli.main()
