"""How two images differ: each file by name, with the reason."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from dray.contract.values import cell
from dray.images.sif import contents, verify
from dray.images.sif import format as sif_format
from dray.images.sif.contents import Entry
from dray.images.sif.format import Sif

_SMALL, _SHOWN, _WIDTH = 1 << 16, 100, 100
# magic, files, time, block size, fragments, compression, block's logarithm, flags
_SUPERBLOCK = struct.Struct("<4s4I3H")
_COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}


def sifs(first: Path, second: Path) -> list[str]:
    """A line for each difference; empty if both files have the same bytes."""
    a, b = sif_format.read(first), sif_format.read(second)
    if verify.digest(first) == verify.digest(second):
        return []
    found = [*_containers(a, b), *_filesystems(a, b)]
    return found or ["SIF: the table of parts, or bytes between the parts"]


def _containers(a: Sif, b: Sif) -> Iterator[str]:
    for name in ("id", "architecture", "created", "modified"):
        yield from _unlike(f"header: {name}", str(getattr(a, name)), str(getattr(b, name)))
    yield from _unlike("signed by", ", ".join(a.signers()) or "nobody", ", ".join(b.signers()) or "nobody")
    for kind in (kind for kind in sif_format.KINDS.values() if kind != "partition"):
        its, others = a.content(kind), b.content(kind)
        if its == others:
            continue
        if kind == "metadata":
            its, others = _indented(its), _indented(others)
        if kind != "signature":
            yield f"{kind}: {_line(its, others)}"
        elif a.signers() == b.signers():
            yield "signature: another signature by the same key"


def _filesystems(a: Sif, b: Sif) -> Iterator[str]:
    if _digest(a) == _digest(b):
        return
    files = list(_files(a, b))
    yield from files
    for name, its, others in zip(("time", "block size", "compression"), _packing(a), _packing(b), strict=True):
        yield from _unlike(f"squashfs: {name}", its, others)
    if not files:
        yield "squashfs: the same files, packed in another way"


def _digest(sif: Sif) -> str:
    digest = hashlib.sha256()
    with sif.path.open("rb") as file:
        file.seek(sif.system.offset)
        left = sif.system.size
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _packing(sif: Sif) -> tuple[str, str, str]:
    with sif.path.open("rb") as file:
        file.seek(sif.system.offset)
        _, _, time, block, _, compression, *_ = _SUPERBLOCK.unpack(file.read(_SUPERBLOCK.size))
    return str(time), str(block), _COMPRESSIONS.get(compression, str(compression))


def _files(first: Sif, second: Sif) -> Iterator[str]:
    a, b = contents.entries(first), contents.entries(second)
    small = [path for path in sorted(a.keys() & b.keys()) if _small_and_other(a[path], b[path])][:_SHOWN]
    a_texts, b_texts = (contents.texts(sif, small) if small else {} for sif in (first, second))
    for path in sorted(a.keys() | b.keys()):
        its, others = a.get(path), b.get(path)
        name = "/" + cell(path.lstrip("/"))
        if its is None or others is None:
            yield f"{name}: only in the {'second' if its is None else 'first'}"
        elif its.kind != others.kind:
            yield from _unlike(name, its.kind, others.kind)
        else:
            if path in a_texts and path in b_texts:
                yield f"{name}: content: {_line(a_texts[path], b_texts[path])}"
            elif its.kind == "file" and its.content != others.content:
                yield f"{name}: content ({its.size} | {others.size} bytes)"
            else:
                yield from _unlike(f"{name}: leads to", its.content, others.content)
            for what in ("mode", "owner", "time"):
                yield from _unlike(f"{name}: {what}", getattr(its, what), getattr(others, what))


def _small_and_other(a: Entry, b: Entry) -> bool:
    return a.kind == b.kind == "file" and a.content != b.content and max(a.size, b.size) <= _SMALL


def _unlike(what: str, a: str, b: str) -> Iterator[str]:
    if a != b:
        yield f"{what}: {cell(a)} | {cell(b)}"


def _line(a: bytes, b: bytes) -> str:
    """The first line that differs, where both are text."""
    try:
        pairs = zip_longest(a.decode().splitlines(), b.decode().splitlines(), fillvalue=None)
    except UnicodeDecodeError:
        return f"{len(a)} | {len(b)} bytes"
    for number, (its, others) in enumerate(pairs, 1):
        if its != others:
            return f"line {number}: {_short(its)} | {_short(others)}"
    return "the same lines with other line ends"


def _indented(text: bytes) -> bytes:
    try:
        return json.dumps(json.loads(text), indent=1, sort_keys=True).encode()
    except ValueError:
        return text


def _short(line: str | None) -> str:
    return "(none)" if line is None else repr(line if len(line) <= _WIDTH else f"{line[:_WIDTH]}...")
