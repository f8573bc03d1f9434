"""Where Docker's clients find their engine: DOCKER_HOST, or the context; and why it does not answer.

Standard library only: `make` runs it before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from dray.contract.findings import ConfigError, UnfitError

_DEFAULT = "/var/run/docker.sock"
_BY_DEFAULT = "Docker's default"
_ANSWER_S = 2.0
_DESKTOP = "start Docker Desktop (on Linux: systemctl --user start docker-desktop)"
_ROOTLESS = "systemctl --user start docker"
# Who listens on a socket of this path, and what starts it.
_SERVICES = (
    (r"/\.docker/(desktop|run)/", "Docker Desktop", _DESKTOP),
    (r"/\.?colima/", "colima", "colima start"),
    (r"podman.machine|/podman/.*-api\.sock", "the Podman machine", "podman machine start"),
    (r"^(/var)?/run/podman/", "Podman's service", "sudo systemctl start podman.socket"),
    (r"/podman/podman\.sock", "Podman's service", "systemctl --user start podman.socket"),
    (r"^(/var)?/run/user/\d+/docker\.sock", "the rootless Docker Engine", _ROOTLESS),
)


@dataclass(frozen=True)
class Endpoint:
    """Where the engine listens."""

    url: str
    source: str
    """What named it, for messages: DOCKER_HOST, a context, or nothing."""

    @property
    def socket(self) -> str:
        """The path of its socket."""
        return self.url.removeprefix("unix://")

    def __str__(self) -> str:
        return f"{self.url} ({self.source})"


def find(environment: Mapping[str, str], home: Path) -> Endpoint:
    """The endpoint that Docker's own client would take. Refuses one that is not a socket of this machine."""
    found = _named(environment, home)
    if not found.url.startswith("unix://"):
        raise ConfigError(
            "dray needs a Docker Engine on this machine, whose folders it binds",
            where=found.source,
            wanted=f"a socket, such as unix://{_DEFAULT}",
            found=found.url,
            fix="unset DOCKER_HOST"
            if found.source == "DOCKER_HOST"
            else "docker context use default; or run dray on the machine of that engine",
        )
    return found


def _named(environment: Mapping[str, str], home: Path) -> Endpoint:
    if environment.get("DOCKER_HOST"):
        return Endpoint(environment["DOCKER_HOST"], "DOCKER_HOST")
    folder = Path(environment.get("DOCKER_CONFIG") or home / ".docker")
    name, where = environment.get("DOCKER_CONTEXT") or "", "DOCKER_CONTEXT"
    if not name:
        name, where = _json(folder / "config.json").get("currentContext") or "", str(folder / "config.json")
    if name in ("", "default"):
        return Endpoint(f"unix://{_DEFAULT}", _BY_DEFAULT)
    file = folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
    url = _json(file).get("Endpoints", {}).get("docker", {}).get("Host")
    if not url:
        raise ConfigError(
            f"the Docker context {name} does not exist",
            where=where,
            wanted=file,
            fix="docker context ls shows those that exist; docker context use default",
        )
    return Endpoint(url, f"context {name}")


def _json(file: Path) -> dict[str, Any]:
    """The file's content; empty if it cannot be read, as Docker's own client takes it."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def knock(endpoint: Endpoint) -> None:
    """Connect once, and raise the reason if that fails: Docker's SDK hides it in a text, and leaves its socket open."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(_ANSWER_S)
        door.connect(endpoint.socket)


def unreachable(endpoint: Endpoint, error: Exception, environment: Mapping[str, str]) -> UnfitError:
    """The error of an engine that does not answer, by the service that should listen there."""
    service, start = next(
        ((service, start) for path, service, start in _SERVICES if re.search(path, endpoint.socket)), ("", "")
    )
    match error:
        case PermissionError():
            problem = f"{service or 'the Docker Engine'} refuses this user"
            fix = _entry(endpoint, service)
        case _ if service:
            problem, fix = f"{service} is not running", start
        case FileNotFoundError():
            problem = "no Docker Engine runs on this machine"
            fix = "install Docker Engine and start it, or set DOCKER_HOST"
        case _:
            problem = "the Docker Engine does not answer"
            fix = "start it (sudo systemctl start docker), or set DOCKER_HOST to one that runs"
    default = endpoint.source == _BY_DEFAULT
    others = [path for path in _others(environment) if default and Path(path).exists()]
    fix = "\nor ".join([fix, *(f"export DOCKER_HOST=unix://{path}" for path in others)])
    named = default or endpoint.source == "DOCKER_HOST"
    return UnfitError(problem, where=endpoint.url if named else endpoint, found=error, fix=fix)


def _entry(endpoint: Endpoint, service: str) -> str:
    """The command that gives a user access to the socket."""
    if service:
        return f"use an engine of your own: docker context use default; ls -l {endpoint.socket} shows its owner"
    try:
        waiting = _joined() and "docker" not in _groups()
    except (ImportError, KeyError, OSError):
        waiting = False
    if waiting:
        return "log in again (or: newgrp docker): this login is older than your place in the docker group"
    return "add yourself to the docker group (sudo usermod -aG docker $USER) and log in again"


def _joined() -> bool:
    import grp  # noqa: PLC0415  not everywhere
    import pwd  # noqa: PLC0415

    return pwd.getpwuid(os.getuid()).pw_name in grp.getgrnam("docker").gr_mem


def _groups() -> set[str]:
    import grp  # noqa: PLC0415

    return {group.gr_name for group in grp.getgrall() if group.gr_gid in os.getgroups()}


def _others(environment: Mapping[str, str]) -> list[str]:
    """Sockets of a user's own engines, which Docker's client takes only when it is told."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    return [f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock"] if runtime else []


class _Local(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def info(endpoint: Endpoint) -> dict[str, Any]:
    """The engine's description of itself; empty if it is late or cannot be read."""
    connection = _Local(endpoint.socket)
    try:
        connection.request("GET", "/info")
        found = json.loads(connection.getresponse().read())
    except (OSError, HTTPException, ValueError):
        return {}
    finally:
        connection.close()
    return found if isinstance(found, dict) else {}
