"""Tokens on a shared disk are copied to each node's own, where it has one: samples are read in any order."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from dray.train.errors import say

_OWN = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"}
_MEMORY = {"ramfs", "tmpfs"}
_LAYERED = {"aufs", "overlay"}  # a container's own; what is below it may be any
_ESCAPED = re.compile(r"\\([0-7]{3})")
_ROOM = 2  # so many times the copy's size has to be free: others use that disk too


def stage(folder: Path, copy: Path) -> None:
    """Copy the tokens to this attempt's folder on the node's own disk, if that is faster."""
    kinds = kind(folder), kind(copy)
    if copy.exists() or kinds[0] in _OWN | _MEMORY | _LAYERED or kinds[1] not in _OWN:
        return
    size, part = sum(path.stat().st_size for path in folder.iterdir()), copy.with_suffix(".part")
    began = time.monotonic()
    stays = f"tokens stay on {kinds[0]}, and are not copied to {copy.parent}"
    try:
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        part.mkdir(mode=0o700)
        if (free := shutil.disk_usage(part).free) < _ROOM * size:
            say(f"{stays}: {size / 1e9:.1f} GB of tokens, and only {free / 1e9:.1f} GB free")
            return
        for file in folder.iterdir():
            shutil.copyfile(file, part / file.name)
        part.rename(copy)
    except OSError as error:
        say(f"{stays}: {error}")
        return
    finally:
        shutil.rmtree(part, ignore_errors=True)
    seconds = time.monotonic() - began
    say(f"tokens copied from {kinds[0]} to this node's {kinds[1]}: {size / 1e9:.1f} GB in {seconds:.0f} s")


def kind(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the folder's file system, as mount(8) names it; empty if unknown."""
    found, place = "", folder.resolve()
    longest = -1
    for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        where, _, what = line.partition(" - ")
        point = Path(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), where.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = what.split()[0], len(point.parts)
    return found
