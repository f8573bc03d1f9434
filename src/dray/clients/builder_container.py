"""The builder's container, in which Apptainer runs as an ordinary user: its user, its rights and its network."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.request import getproxies_environment

from dray.contract.findings import UnfitError

# Apptainer makes user and mount namespaces of its own; it needs no capability for that. A base's own programs run here
# too, and become nobody else by one with setuid.
SECURITY = ("seccomp=unconfined", "apparmor=unconfined", "no-new-privileges")
ROOT = (0, 0)
_HOSTS = Path("/etc/hosts")
FUSE = Path("/dev/fuse")
_LOOPBACK = r"(^|[/@ ])(localhost\b|127\.|\[::1])"


def fetching() -> str:
    """The network of a container that fetches: Docker's own, in which a base's programs reach nothing of this machine.

    This machine's own network if Docker's cannot work: for a proxy on loopback, or names that only /etc/hosts has.
    """
    proxies = getproxies_environment()
    nearby = re.search(_LOOPBACK, f"{proxies.get('http')} {proxies.get('https')}")
    machine = re.escape(socket.gethostname().partition(".")[0])
    # After the address a name that is not the machine's.
    other = rf"^[ \t]*[^#\s][^#\n]*[ \t](?!localhost|ip6-|{machine}(\.|\s|$))[^#\s]"
    named = re.search(other, _HOSTS.read_text(errors="replace"), re.MULTILINE)
    return "host" if named or nearby else "default"


def caller() -> tuple[int, int]:
    """The user and group that build inside: the caller, or Debian's first ordinary user if the caller is root."""
    return (os.getuid(), os.getgid()) if os.getuid() else (1000, 1000)


def reader() -> tuple[int, int]:
    """The user and group that read images inside: those that build, or root if only root may open /dev/fuse."""
    only_root = os.getuid() == 0 and FUSE.exists() and FUSE.stat().st_mode & 0o006 != 0o006
    return ROOT if only_root else caller()


def give(folder: Path) -> None:
    """Give root's folder to the ordinary user who works inside."""
    _own(folder, caller())


def take(folder: Path) -> None:
    """Give the folder back to root, before anything in it is read or kept."""
    _own(folder, ROOT)


def _own(folder: Path, user: tuple[int, int]) -> None:
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, *user, follow_symlinks=False)


def write_for_all() -> None:
    """What root writes from now on, the ordinary user inside can read."""
    if os.getuid() == 0:
        os.umask(0o022)


def require_readable(path: Path) -> None:
    """Refuse what the ordinary user inside cannot read: root's umask was 077 before."""
    about = path.lstat()
    if about.st_uid == 0 and not about.st_mode & 0o004:
        raise UnfitError(
            "the ordinary user who builds cannot read a file of root's", where=path, fix=f"chmod -R a+rX '{path}'"
        )


def renamed(word: str, names: Mapping[str, str]) -> str:
    """A word with other names for the paths in it."""
    for path in sorted(names, key=len, reverse=True):
        word = word.replace(path, names[path])
    return word
