"""This node's part of `ray symmetric-run`, which starts Ray's head on the first node and runs the program there.

What it leaves to others is here: a token, so that nobody else may connect; a folder and a port that no other run has;
and an exit code, since it returns 0 also where Ray did not start.
"""

from __future__ import annotations

import hmac
import os
import re
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from dray.contract import files, hardware, run_folder
from dray.contract.findings import DrayError, UnfitError
from dray.runner import rendezvous
from dray.runner.children import Children, below, ended_with
from dray.runner.plan import read

_OLDEST = (2, 54)  # 2.52 has a token, and 2.53: their nodes do not join
# It shows kilobytes of each process that `ray stop` ends.
_SCRIPT = f"""#!/bin/sh
[ "$1" != stop ] || exec >/dev/null 2>&1
exec "{sys.executable}" -m ray.scripts.scripts "$@"
"""
_OPEN = "r"  # what Ray makes, which it opens to all users; the folder above stays closed
_ANSWER_S = 10.0  # a head that has stopped is refused at once; a busy one may need Linux's third try
# Ray's own end may hide the program's exit code.
_KEEP_CODE = '"$@"; code=$?; printf $code >"$0"; exit $code'


def main(folder: str, gpus: str, *command: str) -> int:
    """Start Ray on this node; return the program's exit code on the first node, and 0 on the others."""
    _require_ray()
    plan = read(f"{folder}/{run_folder.PLAN}")
    store, is_head = int(os.environ["MASTER_PORT"]), os.environ["RANK"] == "0"
    # Of the store's port, which all nodes know, and which a restart changes. It is below Linux's ephemeral ports, and
    # above those of Ray's workers.
    head = (os.environ["MASTER_ADDR"], 20_000 + (store + 5_000) % 10_000)
    if is_head:
        rendezvous.listen(plan.world._replace(port=head[1])).close()  # or a busy port is named
    if all(variable.name != "OMP_NUM_THREADS" for variable in plan.env):
        os.environ.pop("OMP_NUM_THREADS", None)  # for one process a node; Ray sets it for each of its workers
    secret = hmac.digest(rendezvous.secret_of(folder), f"dray ray {store}".encode(), "sha256").hex()
    # The same name on every node: Ray wants that. Sockets below it have paths of at most 107 characters.
    place = Path(f"/tmp/ray-{secret[:12]}")  # noqa: S108  nobody can guess it
    place.mkdir(mode=0o700, exist_ok=True)
    try:
        files.write_atomic(place / "token", secret[12:], mode=0o600)
        files.write_atomic(place / "ray", _SCRIPT, mode=0o700)
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": f"{place}/token",
            "RAY_ADDRESS": f"{head[0]}:{head[1]}",
            "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": str(plan.world.rendezvous_timeout_s),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{place}:{os.environ['PATH']}",  # a layer may have `ray` elsewhere
        }
        ended = _run(place, gpus, [*command], is_head)
        code = "".join(files.tail(place / "code"))
        session = place / _OPEN / "session_latest"  # a worker makes it when the head has answered
        # Where nobody listens, the first node has stopped Ray, and returns the code.
        if code == "0" or (not is_head and session.exists() and not _listens(head)):
            return 0
        logs = f"{folder}/{run_folder.LOGS}/ray-{os.environ['RANK']}"
        with suppress(OSError):
            shutil.copytree(session / "logs", logs, dirs_exist_ok=True)
        if not code:
            raise UnfitError("Ray ended before the program", where=logs, found=ended_with(ended))
        return int(code)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(place: Path, gpus: str, command: list[str], is_head: bool) -> int:
    """How `ray symmetric-run` ended. What it has started hears signals in its place, so that it ends Ray in order."""
    argv = [
        f"{place}/ray",
        "symmetric-run",
        f"--address={os.environ['RAY_ADDRESS']}",
        f"--num-gpus={gpus}",
        f"--min-nodes={os.environ['WORLD_SIZE']}",
        f"--num-cpus={len(os.sched_getaffinity(0))}",
    ]
    if is_head:  # workers refuse these. The monitor is for clusters that grow, and reports each end as a failure
        argv += ["--include-dashboard=false", "--no-monitor", f"--temp-dir={place / _OPEN}"]
    else:  # seconds from the head's end to its own. The head connects to itself, and ends with Ray's own 60
        os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "10"  # noqa: SIM112  Ray's own name
    children = Children()
    children.start([*argv, "--", "sh", "-c", _KEEP_CODE, f"{place}/code", *command], session=True)
    (ray,) = children.running
    while True:
        signals, ended = children.wait()
        if ended:
            return ended[0]
        for number in signals:
            if number == signal.SIGUSR1:  # for what handles it; it would kill the others
                children.ask()
                continue
            # The program, which is below a shell; on the other nodes what `ray start` has started.
            for process in [child for parent in below(ray) for child in below(parent)] or [ray]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)


def _listens(head: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(head, _ANSWER_S):
        return True
    return False


def _require_ray() -> None:
    version = hardware.versions().get("ray", "none")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        raise UnfitError(
            "launcher = ray, and the image lacks a new enough Ray",
            wanted="ray 2.54 or newer, whose nodes join by `ray symmetric-run`",
            found=version,
            fix="dray image layer VARIANT --pip ray, and layer=ray",
        )


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except DrayError as error:
        print(f"dray: {error}", file=sys.stderr)
        sys.exit(error.finding.code)
