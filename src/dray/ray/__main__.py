"""This node's part of `ray symmetric-run`, which starts Ray's head on the first node and runs the program there.

What it leaves to others is here: a token, so that nobody else may connect; a folder and a port that no other run has;
and an exit code, since it returns 0 also where Ray did not start.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dray.contract import exit_codes, files, run_folder
from dray.contract.findings import DrayError, RetryError, UnfitError
from dray.runner import rendezvous
from dray.runner.children import Children, ended_with, exit_code

_OLDEST = (2, 54)  # 2.52 has a token, and 2.53: their nodes do not join
# Below Linux's ephemeral ports, and above those of Ray's workers.
_FIRST_PORT, _PORTS = 20_000, 10_000
# Sockets below it have paths of at most 107 characters, and Ray adds some 70.
_TEMPORARY = "/tmp/ray-"  # noqa: S108  the name goes on with what nobody can guess
_ANSWER_S = 10.0  # a head that has stopped is refused at once; a busy one may need Linux's third try
_PROGRAM = "--program"
_OPEN = "r"  # what Ray makes, which it opens to all users; the folder above stays closed


def main(folder: str, gpus: str, command: list[str]) -> int:
    """Start Ray on this node; return the program's exit code on the first node, and 0 on the others."""
    _require_ray()
    plan = json.loads(files.read(f"{folder}/{run_folder.PLAN}", own=True))
    if "OMP_NUM_THREADS" not in {variable["name"] for variable in plan["env"]}:
        os.environ.pop("OMP_NUM_THREADS", None)  # for one process a node; Ray sets it for each of its workers
    node, nodes, store = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    # Of the store's port, which all nodes know, and which a restart changes. Another program may have it.
    head = (socket.gethostbyname(os.environ["MASTER_ADDR"]), _FIRST_PORT + (store + _PORTS // 2) % _PORTS)
    if not node:
        _require_port(head[1])
    secret = hmac.digest(rendezvous.secret_of(folder), f"dray ray {store}".encode(), "sha256").hex()
    with _private(f"{_TEMPORARY}{secret[:12]}") as place:
        _set_variables(node, place, secret[12:], f"{head[0]}:{head[1]}", plan["world"]["rendezvous_timeout_s"])
        code_file, logs = place / "code", f"{folder}/{run_folder.LOGS}/ray-{node}"
        argv = [
            *(sys.executable, "-m", "ray.scripts.scripts", "symmetric-run", f"--address={head[0]}:{head[1]}"),
            *(f"--min-nodes={nodes}", f"--num-cpus={len(os.sched_getaffinity(0))}", f"--num-gpus={gpus}"),
            # Workers refuse these. The monitor is for clusters that grow, and reports each end as a failure.
            *([] if node else ["--include-dashboard=false", "--no-monitor", f"--temp-dir={place / _OPEN}"]),
            *("--", sys.executable, "-m", "dray.ray", _PROGRAM, str(code_file), *command),
        ]
        ended = _run(argv, below=True)
        session = place / _OPEN / "session_latest"  # a worker makes it when the head has answered
        if node and session.exists() and not _listens(head):  # the first node has stopped Ray, and returns the code
            return 0
        finished = code_file.exists()
        code = int(code_file.read_text()) if finished else exit_code(ended) or exit_codes.UNFIT
        if code:
            with suppress(OSError):
                shutil.copytree(session / "logs", logs, dirs_exist_ok=True)
        if ended >= 0 and not finished:
            unheard = "" if session.exists() else f", without an answer of Ray's head at {head[0]}:{head[1]}"
            raise UnfitError("Ray ended before the program", where=logs, found=ended_with(ended) + unheard)
        return code


def program(file: str, command: list[str]) -> int:
    """Run the program; return its exit code, and write it to the file: Ray's own end may hide it."""
    code = exit_code(_run(command))
    Path(file).write_text(str(code))
    return code


def _set_variables(node: int, place: Path, token: str, head: str, timeout_s: int) -> None:
    """Let Ray and the program find the token, the head and `ray`, which a layer may have outside of PATH."""
    files.write_atomic(place / "token", token, mode=0o600)
    quiet = '[ "$1" != stop ] || exec >/dev/null 2>&1'  # it shows kilobytes of each process that it ends
    start = f'exec {shlex.quote(sys.executable)} -m ray.scripts.scripts "$@"'
    files.write_atomic(place / "ray", f"#!/bin/sh\n{quiet}\n{start}\n", mode=0o700)
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(place / "token"),
        "RAY_ADDRESS": head,
        "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": str(timeout_s),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Seconds from the head's end to a worker's. The head ends with Ray's own 60: it connects to itself.
        **({"RAY_gcs_rpc_server_reconnect_timeout_s": "10"} if node else {}),
        "PATH": f"{place}:{os.environ['PATH']}",
    }


def _run(argv: list[str], *, below: bool = False) -> int:
    """How the command ended. It hears signals; or instead what it has started, and so it ends Ray in order."""
    children = Children()
    children.start(argv, session=True)
    while not (events := children.wait()).ended:
        for number in events.signals:
            if number == signal.SIGUSR1:  # for what handles it; it would kill the others
                children.ask()
                continue
            for child in children.running:
                started = Path(f"/proc/{child}/task/{child}/children").read_text() if below else ""
                for process in started.split() or [str(child)]:
                    with suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGTERM)
    return events.ended.popitem()[1]


def _listens(head: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(head, _ANSWER_S):
        return True
    return False


@contextmanager
def _private(name: str) -> Iterator[Path]:
    """A folder of this user's alone, for as long as Ray runs. It has the same name on every node: Ray wants that."""
    with suppress(FileExistsError):
        Path(name).mkdir(mode=0o700)
    if others := files.open_to_others(name, folder=True):
        raise UnfitError("Ray's folder is not this user's alone", where=name, found=others)
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


def _require_port(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise RetryError(
            f"the port of Ray's head, {port}, is busy on the first node",
            wanted=f"port {port} free",
            found=error.strerror,
            fix="start the run again: Ray gets another port, unless the recipe has `port`; change that",
        ) from error


def _require_ray() -> None:
    try:
        found = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST:
        raise UnfitError(
            "launcher = ray, and the image lacks a new enough Ray",
            wanted=f"ray {_OLDEST[0]}.{_OLDEST[1]} or newer, whose nodes join by `ray symmetric-run`",
            found=found,
            fix="dray image layer VARIANT --pip ray, and layer=ray",
        )


if __name__ == "__main__":
    try:
        if sys.argv[1] == _PROGRAM:
            sys.exit(program(sys.argv[2], sys.argv[3:]))
        sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
    except DrayError as error:
        print(f"dray: {error}", file=sys.stderr)
        sys.exit(error.finding.code)
