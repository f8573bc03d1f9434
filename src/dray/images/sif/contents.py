"""What a SIF holds, read out of its squashfs without root and without starting it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from dray import process
from dray.containers import builder
from dray.contract.findings import ConfigError, UnfitError
from dray.images.sif.format import Sif
from dray.process import Done

# -rw-r--r-- 0/0   1234 2026-01-31 12:00 squashfs-root/opt/dray/image.json
_FILE = re.compile(r"^-\S{9} \S+ +(\d+) \d{4}-\d\d-\d\d \d\d:\d\d squashfs-root/(.*)$", re.MULTILINE)
# opt/dray/image.json R 1700000000 644 0 0 1234 0 0, with a backslash before each odd character of the name
_ENTRY = re.compile(rb"((?:\\.|[^\\ ])+) ([A-Z]) (.*)\n", re.DOTALL)
_UNQUOTE = re.compile(rb"\\(.)", re.DOTALL)
# The versions of squashfs-tools that brought zstd and all options for listing and unpacking, and those for a pipe.
_LISTS, _PIPES = (4, 4), (4, 5)
_NO_ZSTD = "unsupported by this version"
_DATA = b"# START OF DATA"
_BLOCK = 1 << 20
KINDS = {
    "D": "folder",
    "R": "file",
    "S": "link",
    "L": "hard link",
    "I": "socket or pipe",
    "C": "device",
    "B": "device",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of an image, and all that makes it the same as another."""

    kind: str
    content: str = ""
    """Of a file its SHA-256; of a link, a hard link or a device where it leads."""
    mode: str = ""
    owner: str = ""
    time: str = ""
    size: int = 0


def sizes(sif: Sif) -> dict[str, int]:
    """Every file's bytes, unpacked."""
    done = _unsquashfs(sif, ["-lln"])
    return {path: int(size) for size, path in _FILE.findall(done.out)}


def file(sif: Sif, path: str) -> bytes | None:
    """One file of the image."""
    with TemporaryDirectory(prefix="dray-") as scratch:
        # Only newer versions write a file to standard output; login nodes keep old ones for long.
        _unsquashfs(sif, ["-no-xattrs", "-dest", f"{scratch}/out"], [path], writes=Path(scratch))
        found = Path(scratch) / "out" / path
        # A link would be read on this machine.
        return found.read_bytes() if found.is_file() and not found.is_symlink() else None


def entries(sif: Sif) -> dict[str, Entry]:
    """Everything in it."""
    return {name: entry for name, (entry, _) in _piped(sif, (), keep=False).items()}


def texts(sif: Sif, paths: Sequence[str]) -> dict[str, bytes]:
    """Some of its files; small ones."""
    found = _piped(sif, paths, keep=True)
    return {path: found[path][1] for path in paths if path in found}


def _piped(sif: Sif, only: Sequence[str], *, keep: bool) -> dict[str, tuple[Entry, bytes]]:
    """What is unpacked goes through a pipe and never to a disk."""
    with TemporaryDirectory(prefix="dray-") as scratch, ThreadPoolExecutor(1) as beside:
        pipe = Path(scratch) / "pipe"
        os.mkfifo(pipe)
        # Both ends are open before anything starts, so that nobody waits for a program that never came to open its own.
        end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(end, True)
        hold = os.open(pipe, os.O_WRONLY)
        reading = beside.submit(_received, end, keep)
        try:
            options = ["-no-wildcards", "-no-xattrs", "-pf", str(pipe)]
            _unsquashfs(sif, options, only, writes=Path(scratch), needs=_PIPES)
        finally:
            os.close(hold)
        return reading.result()


def _unsquashfs(
    sif: Sif,
    options: Sequence[str],
    files: Sequence[str] = (),
    *,
    writes: Path | None = None,
    needs: tuple[int, int] = _LISTS,
) -> Done:
    binds = {sif.path: False, **({writes: True} if writes else {})}
    argv = ["unsquashfs", "-no-progress", "-offset", str(sif.system.offset), *options, str(sif.path), *files]
    done = builder.tool(argv, binds=binds)
    if done.code == 0:
        return done
    lines = (done.err or done.out).strip().splitlines()
    raise _unfit(needs, lines) or ConfigError(
        "the image's files cannot be read",
        where=sif.path,
        found="\n".join(lines[-5:]),
        fix="build or copy the image again",
    )


def _unfit(needs: tuple[int, int], lines: Sequence[str]) -> UnfitError | None:
    """The reason that is not the image's: an old unsquashfs says no more than which options it has."""
    shown = re.search(r"version (\d+)\.(\d+)\S*", builder.tool(["unsquashfs", "-version"], binds={}).out)
    lacks = next((line for line in lines if _NO_ZSTD in line), None)
    if not lacks and not (shown and (int(shown[1]), int(shown[2])) < needs):
        return None
    return UnfitError(
        "this machine's unsquashfs cannot look into the image",
        where=process.which("unsquashfs"),
        wanted="squashfs-tools {}.{} or newer, with zstd".format(*needs),
        found=lacks or (shown and shown[0]),
        fix="install a newer one; or take it off PATH where a Docker Engine is: dray then uses one in a container",
    )


def _received(end: int, keep: bool) -> dict[str, tuple[Entry, bytes]]:
    with os.fdopen(end, "rb", _BLOCK) as stream:
        found = {os.fsdecode(name): (entry, b"") for name, entry in _described(stream)}
        for name, (entry, _) in found.items():
            if entry.kind == "file":
                found[name] = _filled(entry, stream, keep)
        return found


def _described(stream: IO[bytes]) -> Iterator[tuple[bytes, Entry]]:
    """The names and what stands beside them, up to where the files' bytes begin."""
    line = b""
    for row in stream:
        if row.startswith(_DATA):
            stream.readline()
            return
        line += row if row != b"#\n" else b""
        if described := _ENTRY.fullmatch(line):  # else its name goes on after the line's end
            line = b""
            name, kind, rest = described.groups()
            yield _UNQUOTE.sub(rb"\1", name), _entry(kind.decode(), os.fsdecode(rest))


def _entry(kind: str, fields: str) -> Entry:
    if kind == "L":
        return Entry(kind=KINDS[kind], content=fields)
    time, mode, user, group, *rest = fields.split(" ", 4)
    made = Entry(kind=KINDS[kind], content="".join(rest), mode=mode, owner=f"{user}/{group}", time=time)
    return replace(made, size=int(made.content.split()[0])) if kind == "R" else made


def _filled(entry: Entry, stream: IO[bytes], keep: bool) -> tuple[Entry, bytes]:
    """Files' bytes follow one another in the order of their names."""
    digest, left, text = hashlib.sha256(), entry.size, b""
    while left:
        block = stream.read(min(left, _BLOCK))
        if not block:  # unsquashfs has failed, and says why
            break
        digest.update(block)
        text += block if keep else b""
        left -= len(block)
    return replace(entry, content=digest.hexdigest()), text
