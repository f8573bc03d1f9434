"""The builder's container, in which Apptainer runs as an ordinary user: its user, its mounts and its output."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from docker.types import Mount

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

# Apptainer makes user and mount namespaces of its own; it needs no capability for that. A base's own programs run here
# too, and become nobody else by one with setuid.
SECURITY = ("seccomp=unconfined", "apparmor=unconfined", "no-new-privileges")
_HOSTS = Path("/etc/hosts")
_FUSE = "/dev/fuse"


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
    podman = _rootless_podman(client)
    host = client.api.create_host_config(
        mounts=mounts,
        network_mode=fetching() if network else "none",
        security_opt=[*SECURITY, "unmask=ALL"] if podman else list(SECURITY),
        devices=[f"{_FUSE}:{_FUSE}:rwm"] if fuse and Path(_FUSE).exists() else [],
    )
    made = client.api.create_container(
        image,
        command,
        name=f"dray-builder-{secrets.token_hex(4)}",
        environment=dict(environment),
        user=":".join(map(str, user or caller())),
        # systempaths=unconfined in Docker's own client: no user namespace may mount /proc where parts are masked.
        host_config={**host, "MaskedPaths": [], "ReadonlyPaths": [], **({"UsernsMode": "keep-id"} if podman else {})},
    )
    try:
        running = client.containers.get(made["Id"])
        running.start()
        yield running
    finally:
        client.api.remove_container(made["Id"], force=True)


def _rootless_podman(client: docker.DockerClient) -> bool:
    """Whether this is an ordinary user's Podman: there the caller is root inside, unless it is told to keep the id."""
    return bool(client.info().get("Rootless"))  # which Docker does not say


def fetching() -> str:
    """The network of a container that fetches: Docker's own, in which a base's programs reach nothing of this machine.

    This machine's own network if Docker's cannot work: for a proxy on loopback, or names that only /etc/hosts has.
    """
    proxies = [value for name, value in os.environ.items() if name.lower() in ("http_proxy", "https_proxy")]
    if any(_is_local(urlsplit(value if "://" in value else f"http://{value}").hostname or "") for value in proxies):
        return "host"
    own = socket.gethostname().partition(".")[0]
    lines = (line.partition("#")[0].split() for line in _HOSTS.read_text(errors="replace").splitlines())
    names = [name for _, *names in filter(None, lines) for name in names]
    common = re.compile(rf"localhost.*|ip6-.*|{re.escape(own)}(\..*)?")
    return "default" if all(map(common.fullmatch, names)) else "host"


def _is_local(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def looker() -> tuple[int, int]:
    """The user and group that read images inside: the builder's, or root if only root may open /dev/fuse."""
    fuse = Path(_FUSE)
    own = os.getuid() == 0 and fuse.exists() and fuse.stat().st_mode & 0o006 != 0o006
    return (0, 0) if own else caller()


def give(path: Path) -> None:
    """Give root's folder to the ordinary user who works inside."""
    if os.getuid() == 0:
        os.chown(path, *caller())


def take(folder: Path) -> None:
    """Give the folder back to root, before anything in it is read or kept."""
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 0, 0, follow_symlinks=False)


def bind(path: Path, *, read_only: bool = True) -> Mount:
    """A mount of this path at the same path inside."""
    return Mount(target=str(path), source=str(path), type="bind", read_only=read_only)


def readable(path: Path, scratch: Path) -> Path:
    """The path, if the user inside can read all of it; else a readable copy in `scratch`, on the same disk.

    Root's umask may be 077, and root itself does not build.
    """
    if os.getuid() != 0 or all(_can_read(one) for one in (path, *path.rglob("*"))):
        return path
    copy = scratch / f"{secrets.token_hex(4)}-{path.name}"
    if path.is_dir():
        shutil.copytree(path, copy, symlinks=True, copy_function=_lend)
        for folder in (copy, *(one for one in copy.rglob("*") if one.is_dir() and not one.is_symlink())):
            folder.chmod(0o755)
    else:
        _lend(path, copy)
    return copy


def _can_read(path: Path) -> bool:
    found, (uid, gid) = path.lstat(), caller()
    if stat.S_ISLNK(found.st_mode):
        return True
    wanted = 0o5 if stat.S_ISDIR(found.st_mode) else 0o4
    shift = 6 if found.st_uid == uid else 3 if found.st_gid == gid else 0
    return found.st_mode >> shift & wanted == wanted


def _lend(source: str | Path, target: str | Path) -> None:
    """Hard-link a file that all can read; copy others."""
    if _can_read(Path(source)):
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
    else:
        shutil.copy2(source, target)
        Path(target).chmod(0o755 if Path(source).stat().st_mode & stat.S_IXUSR else 0o644)


def caller() -> tuple[int, int]:
    """The user and group that build inside: the caller, or Debian's first ordinary user if the caller is root."""
    return (os.getuid(), os.getgid()) if os.getuid() else (1000, 1000)


def mapped(word: str | Path, inside: Mapping[Path, str]) -> str:
    """A path by its name in the container, also one below what is bound; any other word as it is."""
    if isinstance(word, str):
        return word
    for above in (word, *word.parents):
        if above in inside:
            return str(Path(inside[above], word.relative_to(above)))
    return str(word)


def renamed(word: str, inside: Mapping[Path, str]) -> str:
    """A word with the container's names of all paths in it."""
    for path in sorted(inside, key=lambda path: len(str(path)), reverse=True):
        word = word.replace(str(path), inside[path])
    return word


def named(line: str, inside: Mapping[Path, str]) -> str:
    """A line with this machine's paths in place of the container's."""
    for path, target in inside.items():
        line = line.replace(target, str(path))
    return line


def lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """The whole lines of a stream that Docker cuts anywhere."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
