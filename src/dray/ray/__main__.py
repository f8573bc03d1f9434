"""`launcher = "ray"`: one Ray cluster of the job's nodes, and the user's program on the first. One process a node.

Ray's own token, made from the run's secret, keeps others out. Messages through torch's store, which has no passwords,
are signed with the secret.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dray.contract import exit_codes, files, run_folder
from dray.runner import rendezvous
from dray.runner.children import Children, exit_code

_OLDEST = (2, 52)  # the first whose ports ask for a token
_TRY, _GRACE = 0.2, 10.0  # seconds
_RAY, _RENDEZVOUS, _PROGRAM = range(3)  # what runs here
_HEAD, _END = "dray-ray-head", "dray-ray-end"
# Sockets below it have paths of at most 107 characters, and Ray adds some 70.
_TEMPORARY = "/tmp/ray-"  # noqa: S108  the name goes on with what nobody can guess
_OWN = "r"  # what Ray makes, which it opens to all users; the folder above stays closed


class Told:
    """Messages of the first node to the others, through torch's store."""

    def __init__(self, secret: bytes) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  seconds

        self._secret = secret
        self._store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def say(self, key: str, value: str) -> None:
        """Send a value, once."""
        self._store.set(key, json.dumps([value, self._signed(key, value)]))

    def heard(self, key: str) -> str | None:
        """The value, None before it has come."""
        if not self._store.check([key]):
            return None
        try:
            value, signed = json.loads(self._store.get(key))
        except ValueError:
            value = signed = ""
        if not hmac.compare_digest(str(signed), self._signed(key, str(value))):
            sys.exit(_fail("a value in torch's store is not from the first node", f"found:  the key {key}"))
        return str(value)

    def _signed(self, key: str, value: str) -> str:
        return hmac.digest(self._secret, f"dray {key} {value}".encode(), "sha256").hex()


def main(folder: str, gpus: str, command: list[str]) -> int:
    """On the first node start Ray's head, and the program once all nodes have joined; elsewhere be a worker."""
    _require_ray()
    plan = json.loads(files.read(Path(folder, run_folder.PLAN), own=True))
    secret = rendezvous.secret_of(folder)
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "OMP_NUM_THREADS" not in {variable["name"] for variable in plan["env"]}:
        os.environ.pop("OMP_NUM_THREADS", None)  # for one process a node; Ray sets it for each of its workers
    told = Told(secret)
    limit = time.monotonic() + plan["world"]["rendezvous_timeout_s"]
    address = name = ""
    while node and not address:
        address, _, name = (told.heard(_HEAD) or "").partition(" ")
        if time.monotonic() > limit:
            return _fail("Ray's head did not start", f"fix:    see {run_folder.LOGS}/ray-0.log")
        time.sleep(_TRY)
    with _temporary(_made(name) if node else tempfile.mkdtemp(prefix=_TEMPORARY), secret) as place:
        resources = [f"--num-cpus={len(os.sched_getaffinity(0))}", f"--num-gpus={gpus}"]
        own = Ray(told, place, f"{folder}/{run_folder.LOGS}/ray-{node}", resources)
        code = own.worker(address) if node else own.head(nodes, command, limit)
        own.keep_logs(code)
        return code


class Ray:
    """Ray on this node."""

    def __init__(self, told: Told, place: Path, logs: str, resources: list[str]) -> None:
        self._told, self._place, self._logs, self._resources = told, place, logs, resources
        self._children = Children()

    def head(self, nodes: int, command: list[str], limit: float) -> int:
        """Start the head and the program; return the program's exit code, or that of the failure before it."""
        address = socket.gethostbyname(os.environ["MASTER_ADDR"])
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        os.environ["RAY_ADDRESS"] = f"{address}:{port}"
        self._start("--head", "--include-dashboard=false", f"--port={port}", f"--node-ip-address={address}")
        children, code, started, told, ended, up = self._children, 0, False, False, False, self._place / "up"
        while _RAY in children.running.values():
            events = children.wait(_TRY)
            for number in events.signals:
                children.tell(number)
            if _RAY in events.ended and not ended:
                code = _fail("Ray's head ended", f"found:  exit code {exit_code(events.ended[_RAY])}")
            elif not started and _listens(address, port):
                started = True
                children.start([sys.executable, "-m", "dray.ray", str(nodes), str(limit), str(up)], label=_RENDEZVOUS)
            elif not told and up.exists():  # a worker that comes earlier gives up
                told = True
                self._told.say(_HEAD, f"{address}:{port} {self._place}")
            elif not started and time.monotonic() > limit:
                code, ended = _fail("Ray's head does not listen", f"where:  {address}:{port}"), True
                children.end(_GRACE)
            if events.ended.get(_RENDEZVOUS) == 0 and not events.signals:
                children.start(command, label=_PROGRAM, session=True)
            elif last := {*events.ended} & {_RENDEZVOUS, _PROGRAM}:
                code, ended = exit_code(events.ended[last.pop()]), True
                self._told.say(_END, str(code))
                children.end(_GRACE)
        while children.running:
            children.end(_GRACE)
            children.wait()
        return code

    def worker(self, address: str) -> int:
        """Be a worker until the program has ended; return 0 then, since the first node returns its exit code."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            host, _, port = address.rpartition(":")
            way.connect((host, int(port)))  # sends nothing: the address of the interface that leads there
            own = way.getsockname()[0]
        self._start(f"--address={address}", f"--node-ip-address={own}")
        ended = False
        while self._children.running:
            events = self._children.wait(1.0)
            for number in events.signals:
                self._children.tell(number)
            ended = ended or bool(events.signals) or self._told.heard(_END) is not None
            if _RAY in events.ended and not ended:
                return _fail("Ray ended on this node", f"found:  exit code {exit_code(events.ended[_RAY])}")
            if ended:
                self._children.end(_GRACE)
        return 0

    def keep_logs(self, code: int) -> None:
        """Copy Ray's logs after a failure; its own folder is deleted."""
        logs = self._place / _OWN / "session_latest" / "logs"
        if code and logs.is_dir():
            shutil.copytree(logs, self._logs, dirs_exist_ok=True)

    def _start(self, *options: str) -> None:
        log = os.open(f"{self._logs}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        common = ("start", "--block", "--disable-usage-stats", f"--temp-dir={self._place / _OWN}", *self._resources)
        argv = [sys.executable, "-m", "ray.scripts.scripts", *common, *options]
        self._children.start(argv, label=_RAY, output=log)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _TRY).close()
    except OSError:
        return False
    return True


def _made(name: str) -> str:
    """The first node's folder has the same name on every node: Ray wants that."""
    try:
        Path(name).mkdir(mode=0o700)
    except FileExistsError:
        about = os.lstat(name)
        if about.st_uid != os.getuid() or about.st_mode & 0o7777 != 0o700:
            sys.exit(_fail("Ray's folder was made by another user", f"where:  {name}"))
    return name


@contextmanager
def _temporary(name: str, secret: bytes) -> Iterator[Path]:
    """Ray's folder with the token in it, which the environment names."""
    place = Path(name)
    token = place / f"token-{os.getpid()}"
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(hmac.digest(secret, b"dray ray token", "sha256").hex())
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _require_ray() -> None:
    try:
        found = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST:
        wanted = f"wanted: ray {_OLDEST[0]}.{_OLDEST[1]} or newer, whose ports ask for a token"
        fix = "fix:    dray image layer VARIANT --pip ray, and layer=ray"
        sys.exit(_fail("launcher = ray, and the image lacks a new enough Ray", wanted, f"found:  {found}", fix))


def _fail(problem: str, *lines: str) -> int:
    print("\n  ".join([f"dray: {problem}", *lines]), file=sys.stderr, flush=True)
    return exit_codes.UNFIT


def meet(nodes: int, limit: float, up: Path) -> int:
    """Wait until all nodes have joined Ray; create the file `up` when the first has."""
    import ray  # type: ignore[import-not-found]  # noqa: PLC0415

    ray.init(log_to_driver=False, logging_level="ERROR")
    while (alive := sum(one["Alive"] for one in ray.nodes())) < nodes:
        if alive:
            up.touch()
        if time.monotonic() > limit:
            return _fail("not all nodes have joined Ray", f"wanted: {nodes} nodes", f"found:  {alive}")
        time.sleep(_TRY)
    return 0


if __name__ == "__main__":
    if sys.argv[1].isdigit():  # a folder is no number
        sys.exit(meet(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])))
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
