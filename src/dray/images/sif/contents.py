"""The files of a SIF, read from its squashfs without root and without starting it."""

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
from dray.clients import builder
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
    """One entry of an image, with all that is compared with another image's."""

    kind: str
    content: str = ""
    """A file's SHA-256; the target of a link or a hard link; a device's number."""
    mode: str = ""
    owner: str = ""
    time: str = ""
    size: int = 0


def sizes(sif: Sif) -> dict[str, int]:
    """The unpacked size of every file in bytes, by path."""
    done = _unsquashfs(sif, ["-lln"])
    return {path: int(size) for size, path in _FILE.findall(done.out)}


def file(sif: Sif, path: str) -> bytes | None:
    """The content of one file; None if it is missing, or a link."""
    with TemporaryDirectory(prefix="dray-") as scratch:
        # Only newer versions write a file to standard output; login nodes keep old ones for long.
        _unsquashfs(sif, ["-no-xattrs", "-dest", f"{scratch}/out"], [path], writes=Path(scratch))
        found = Path(scratch) / "out" / path
        # A link would be read on this machine.
        return found.read_bytes() if found.is_file() and not found.is_symlink() else None


def entries(sif: Sif) -> dict[str, Entry]:
    """All entries of the image, by path."""
    return {name: entry for name, (entry, _) in _piped(sif, (), keep=False).items()}


def texts(sif: Sif, paths: Sequence[str]) -> dict[str, bytes]:
    """The content of these small files, as far as the image has them."""
    found = _piped(sif, paths, keep=True)
    return {path: found[path][1] for path in paths if path in found}


def _piped(sif: Sif, only: Sequence[str], *, keep: bool) -> dict[str, tuple[Entry, bytes]]:
    """Unpack through a pipe, without a disk."""
    with TemporaryDirectory(prefix="dray-") as scratch, ThreadPoolExecutor(1) as beside:
        pipe = Path(scratch) / "pipe"
        os.mkfifo(pipe)
        # dray opens both ends itself: it must not wait for a program that fails before it opens its own.
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
    """The error if unsquashfs is too old: it prints only its options. None if the image itself is at fault."""
    shown = re.search(r"version (\d+)\.(\d+)\S*", builder.tool(["unsquashfs", "-version"], binds={}).out)
    lacks = next((line for line in lines if _NO_ZSTD in line), None)
    if not lacks and not (shown and (int(shown[1]), int(shown[2])) < needs):
        return None
    return UnfitError(
        "this machine's unsquashfs cannot read the image",
        where=process.which("unsquashfs"),
        wanted="squashfs-tools {}.{} or newer, with zstd".format(*needs),
        found=lacks or (shown and shown[0]),
        fix="install a newer one; or, with a Docker Engine, take it off PATH: dray then runs one in a container",
    )


def _received(end: int, keep: bool) -> dict[str, tuple[Entry, bytes]]:
    with os.fdopen(end, "rb", _BLOCK) as stream:
        found = {os.fsdecode(name): (entry, b"") for name, entry in _described(stream)}
        for name, (entry, _) in found.items():
            if entry.kind == "file":
                found[name] = _filled(entry, stream, keep)
        return found


def _described(stream: IO[bytes]) -> Iterator[tuple[bytes, Entry]]:
    """Each name with its entry, up to the files' bytes."""
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
        if not block:  # unsquashfs has failed, and its error says why
            break
        digest.update(block)
        text += block if keep else b""
        left -= len(block)
    return replace(entry, content=digest.hexdigest()), text
