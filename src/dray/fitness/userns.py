"""Enter a user namespace, and use its rights, as Apptainer does: the last line on stdout says why that fails.

A program of its own, since a process cannot leave the namespace again; and no `unshare` of util-linux, since AppArmor
on Ubuntu has other rules for programs with a profile of their own than for the rest.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEWUSER, _NEWNS = 0x10000000, 0x00020000
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
_SET_DUMPABLE = 4
_ORDINARY = 1000  # whom root's builds run as


def _call(libc: ctypes.CDLL, name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def enter() -> None:
    """Enter the namespaces; root gives up its rights first."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        user = group = _ORDINARY
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        _call(libc, "prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # /proc/self would stay root's
    _call(libc, "unshare", _NEWUSER | _NEWNS)
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_bytes(line.encode())  # text needs a codec, which could be in root's folder
    _call(libc, "mount", None, b"/", None, _PRIVATE, None)


if __name__ == "__main__":
    try:
        enter()
    except (OSError, AttributeError) as error:
        print(error)
        raise SystemExit(1) from None
