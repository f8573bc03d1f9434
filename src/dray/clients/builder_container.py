"""The builder's container, in which Apptainer runs as an ordinary user: its user, its rights and its output."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dray.contract.findings import UnfitError

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container
    from docker.types import Mount

# Apptainer makes user and mount namespaces of its own; it needs no capability for that. A base's own programs run here
# too, and become nobody else by one with setuid.
SECURITY = ("seccomp=unconfined", "apparmor=unconfined", "no-new-privileges")
_ROOT = (0, 0)
_HOSTS = Path("/etc/hosts")
_FUSE = Path("/dev/fuse")
_LOOPBACK = re.compile(r"localhost|127\..*|::1")


@contextmanager
def started(
    client: docker.DockerClient,
    image: str,
    command: list[str],
    *,
    mounts: list[Mount],
    environment: Mapping[str, str],
    network: bool = False,
    user: tuple[int, int] | None = None,
    fuse: bool = False,
) -> Iterator[Container]:
    """Run a command in the container, and remove it at the end. Without /dev/fuse, Apptainer unpacks an image."""
    # An ordinary user's Podman says Rootless, Docker does not. There the caller is root inside, unless his id is kept.
    podman = bool(client.info().get("Rootless"))
    host = client.api.create_host_config(
        mounts=mounts,
        network_mode=fetching() if network else "none",
        security_opt=[*SECURITY, "unmask=ALL"] if podman else list(SECURITY),
        devices=[f"{_FUSE}:{_FUSE}:rwm"] if fuse and _FUSE.exists() else [],
    )
    created = client.api.create_container(
        image,
        command,
        name=f"dray-builder-{secrets.token_hex(4)}",
        environment=dict(environment),
        user=":".join(map(str, user or caller())),
        # systempaths=unconfined in Docker's own client: no user namespace may mount /proc where parts are masked.
        host_config={**host, "MaskedPaths": [], "ReadonlyPaths": [], **({"UsernsMode": "keep-id"} if podman else {})},
    )
    try:
        running = client.containers.get(created["Id"])
        running.start()
        yield running
    finally:
        client.api.remove_container(created["Id"], force=True)


def fetching() -> str:
    """The network of a container that fetches: Docker's own, in which a base's programs reach nothing of this machine.

    This machine's own network if Docker's cannot work: for a proxy on loopback, or names that only /etc/hosts has.
    """
    proxies = [value for name, value in os.environ.items() if name.lower() in ("http_proxy", "https_proxy")]
    addresses = [urlsplit(value if "://" in value else f"http://{value}").hostname or "" for value in proxies]
    lines = _HOSTS.read_text(errors="replace").splitlines()
    names = [name for line in lines for name in line.partition("#")[0].split()[1:]]
    host = re.escape(socket.gethostname().partition(".")[0])
    usual = re.compile(rf"localhost.*|ip6-.*|{host}(\..*)?")
    if any(map(_LOOPBACK.fullmatch, addresses)) or not all(map(usual.fullmatch, names)):
        return "host"
    return "default"


def caller() -> tuple[int, int]:
    """The user and group that build inside: the caller, or Debian's first ordinary user if the caller is root."""
    return (os.getuid(), os.getgid()) if os.getuid() else (1000, 1000)


def reader() -> tuple[int, int]:
    """The user and group that read images inside: those that build, or root if only root may open /dev/fuse."""
    only_root = os.getuid() == 0 and _FUSE.exists() and _FUSE.stat().st_mode & 0o006 != 0o006
    return _ROOT if only_root else caller()


def give(path: Path) -> None:
    """Give root's folder to the ordinary user who works inside."""
    if os.getuid() == 0:
        os.chown(path, *caller())


def take(folder: Path) -> None:
    """Give the folder back to root, before anything in it is read or kept."""
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 0, 0, follow_symlinks=False)


def require_readable(path: Path) -> None:
    """Refuse what the ordinary user inside cannot read: root's umask may be 077."""
    if os.getuid() == 0 and not path.stat().st_mode & 0o004:
        raise UnfitError(
            "the ordinary user who builds cannot read a file of root's", where=path, fix=f"chmod -R a+rX '{path}'"
        )


def renamed(word: str, names: Mapping[str, str]) -> str:
    """A word with other names for the paths in it."""
    for path in sorted(names, key=len, reverse=True):
        word = word.replace(path, names[path])
    return word


def lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """The whole lines of a stream that Docker cuts anywhere."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
