"""`python -m dray` for the stand-ins of a test, by a fork of a process that has imported dray: it costs a tenth.

In a stand-in: exec "$PYTHON" -SE "$WARM" SYS.PREFIX dray WORDS
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

CLIENT = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(__file__), "socket"))
opened = [int(name) for name in os.listdir("/proc/self/fd")]
files = []
for number in opened:
    try:
        files += [number] if os.get_inheritable(number) else []
    except OSError:
        pass  # that of the folder
umask = os.umask(0)
told = {"files": files, "argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "umask": umask}
socket.send_fds(server, [b"-"], files)
server.sendall(json.dumps(told).encode())
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(9)))
"""


@cache
def client() -> Path:
    """The program to start. Its server ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="dray-warm-")
    atexit.register(folder.cleanup)
    path = Path(folder.name, "client.py")
    path.write_text(CLIENT)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path.with_name("socket")))
        listening.listen()
        argv = [sys.executable, __file__, str(listening.fileno())]
        server = subprocess.Popen(argv, pass_fds=[listening.fileno()], stdin=subprocess.PIPE)
    atexit.register(server.communicate)
    return path


def program(path: Path) -> Path:
    """Write it as the command `dray`."""
    path.parent.mkdir(exist_ok=True)
    argv = [sys.executable, "-SE", str(client()), sys.prefix, "dray"]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
    path.chmod(0o755)
    return path


def serve(listening: socket.socket) -> None:
    """Each program has a process of its own, whose parent waits for it and tells how it ended."""
    import dray

    rooms = Path(dray.__file__).parent
    for room in ("cli", "fitness", "remote", "runs"):  # where verbs find what they import as they start
        for file in (rooms / room).rglob("[a-z]*.py"):
            importlib.import_module(".".join(("dray", *file.relative_to(rooms).with_suffix("").parts)))
    importlib.import_module("dray.planning.plan")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while select.select([listening, 0], [], [])[0] == [listening]:  # the pipe ends with those who have started this
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            start(connection)
        connection.close()


def start(connection: socket.socket) -> None:
    """What a client asks for."""
    _, opened, _, _ = socket.recv_fds(connection, 1, 250)
    with connection.makefile("rb") as told:
        words = json.load(told)
    program = os.fork()
    if program == 0:
        connection.close()
        become(opened, **words)
    for number in opened:
        os.close(number)
    if not ended_before(program, connection):
        os.kill(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(ConnectionError):  # its client was killed
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def ended_before(program: int, connection: socket.socket) -> bool:
    """Wait until the program ends, or its client; return whether it was the program."""
    ends = select.poll()
    ended = os.pidfd_open(program)
    ends.register(ended, select.POLLIN)
    ends.register(connection, 0)  # POLLHUP alone: a client that lives has closed its half
    return ended in dict(ends.poll())


def become(opened: list[int], files: list[int], argv: list[str], cwd: str, env: dict[str, str], umask: int) -> None:
    """As `python -m` in this environment."""
    above = [os.dup2(number, 300 + place) for place, number in enumerate(opened)]
    os.closerange(3, 300)
    for number, place in zip(above, files, strict=True):
        os.dup2(number, place)
        os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering, encoding="utf-8", closefd=False)
        for number, (mode, buffering) in enumerate((("r", -1), ("w", -1), ("w", 1)))
    )
    os.environ.clear()
    os.environ.update(env)
    os.umask(umask)
    os.chdir(cwd)
    sys.prefix, *sys.argv = argv
    sys.path[:1] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(":"))]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
