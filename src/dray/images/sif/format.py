"""Read and write the SIF file format: Apptainer's own bytes differ with its version and with each build."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dray.contract import files
from dray.contract.findings import ConfigError

LAUNCH = b"#!/usr/bin/env run-singularity\n"
MAGIC = b"SIF_MAGIC\0"
VERSION = b"01\0"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
ARCHITECTURES = {"amd64": b"02\0", "arm64": b"04\0"}
KINDS = {0x4001: "definition", 0x4004: "partition", 0x4005: "signature", 0x4006: "metadata", 0x4009: "OCI index"}
_NUMBERS = {kind: number for number, kind in KINDS.items()}
# launch, magic, version, architecture, id, created, modified, free, total, and offset and size of descriptors and data
_HEADER = struct.Struct("<32s10s3s3s16s8q")
# kind, used, id, group, link, offset, size, size with padding, created, modified, user, group, name, of the kind's own
_DESCRIPTOR = struct.Struct("<i?3I7q128s384s")
_PARTITION = struct.Struct("<2i3s")  # filesystem, role, architecture
_SQUASHFS, _PRIMARY = 1, 2
DATA = 3  # the role of a squashfs that is bound into another image's container
_GROUP = 0xF0000001
_TOTAL, _MOST = 48, 4096
_TABLE = 4096
_DATA = _TABLE + _TOTAL * _DESCRIPTOR.size
_PAGE = 4096
_METADATA = "inspect-metadata.json"
# As `make image-VARIANT` names what it builds.
_NAME = re.compile(r"dray-(\w+)\.sif")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the file, such as the partition or a signature."""

    kind: str
    group: int
    offset: int
    size: int
    extra: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Sif:
    """The header and the descriptors of a SIF."""

    path: Path
    architecture: str
    parts: tuple[Part, ...]
    system: Part
    """The squashfs with the root filesystem."""

    def signers(self) -> list[str]:
        """Fingerprints of the keys that the signatures name. Only Apptainer checks whether the signatures are valid."""
        return [part.extra[4:24].hex().upper() for part in self.parts if part.kind == "signature"]


def write(
    squashfs: Path, out: Path, *, epoch: int, definition: bytes, metadata: bytes = b"", role: int = _PRIMARY
) -> None:
    """Write a squashfs as the SIF `out`, in the layout of `apptainer build`, without this machine's name or time."""
    parts = [("definition", "", definition), *([("metadata", _METADATA, metadata)] if metadata else [])]
    architecture = ARCHITECTURES[MACHINES[platform.machine()]]
    with out.open("wb") as file, squashfs.open("rb") as source:
        table, end = b"", _DATA
        for kind, name, content in parts:
            file.seek(end)
            file.write(content)
            table += _described(kind, table, start=end, offset=end, size=len(content), epoch=epoch, name=name)
            end += len(content)
        start = -(-end // _PAGE) * _PAGE  # mounting wants whole pages
        file.seek(start)
        shutil.copyfileobj(source, file, 1 << 20)
        size, extra = file.tell() - start, _PARTITION.pack(_SQUASHFS, role, architecture)
        table += _described("partition", table, start=end, offset=start, size=size, epoch=epoch, extra=extra)
        source.seek(0)
        identity = uuid.UUID(bytes=hashlib.file_digest(source, "sha256").digest()[:16], version=4).bytes
        free = _TOTAL - len(table) // _DESCRIPTOR.size
        places = (free, _TOTAL, _TABLE, _DATA - _TABLE, _DATA, start + size - _DATA)
        file.seek(0)
        file.write(_HEADER.pack(LAUNCH, MAGIC, VERSION, architecture, identity, epoch, epoch, *places))
        file.seek(_TABLE)
        file.write(table)
    out.chmod(0o755)


def metadata(rootfs: Path, definition: bytes) -> bytes:
    """What `apptainer inspect` shows. Without it, inspect mounts the image and starts a shell."""
    labels = json.loads((rootfs / ".singularity.d" / "labels.json").read_bytes())
    attributes = {"labels": labels, "deffile": definition.decode().rstrip("\n")}
    return json.dumps({"data": {"attributes": attributes}, "type": "container"}, sort_keys=True).encode()


def read(path: Path) -> Sif:
    """Read the header and descriptors. Refuses a file that is not a complete SIF with one root filesystem."""
    try:
        with files.open_regular(path) as file:
            return _read(path, file)
    except FileNotFoundError:
        variant = named[1] if (named := _NAME.fullmatch(path.name)) else "cpu"
        fix = f"make image-{variant} builds build/dray-{variant}.sif; or name the file of another image"
        raise ConfigError("the image does not exist", wanted=path, fix=fix) from None
    except OSError as error:
        raise ConfigError("the image cannot be read", where=path, found=error.strerror) from error


def require_machine(path: Path, *, what: str, where: object, fix: str) -> None:
    """Refuse a SIF for another architecture: its programs would end in `exec format error`."""
    architecture, machine = read(path).architecture, platform.machine()
    own = MACHINES.get(machine, machine)
    if architecture != own:
        raise ConfigError(
            f"the {what} is for another architecture", where=where, wanted=own, found=architecture, fix=fix
        )


def _read(path: Path, file: IO[bytes]) -> Sif:
    size = file.seek(0, 2)
    head = _at(file, 0, _HEADER.size)
    if len(head) < _HEADER.size or head[32:42] != MAGIC:
        raise _refused(path, "an empty file" if not size else f"a file that begins with {head[:16]!r}")
    _, _, _, architecture, _, _, _, _, total, table, length, *_ = _HEADER.unpack(head)
    if not 0 <= total <= min(length // _DESCRIPTOR.size, _MOST) or not 0 <= table <= size - length:
        raise _refused(path, f"a table of {total} descriptors in {length} bytes at {table}, in a file of {size} bytes")
    parts = tuple(_parts(_at(file, table, total * _DESCRIPTOR.size)))
    for part in parts:
        if part.offset < 0 or not 0 <= part.size <= size - part.offset:
            raise _refused(
                path,
                f"the {part.kind} at {part.offset} has {part.size} bytes, and the file has {size}",
                wanted="a complete SIF; this one was cut short, or its table is damaged",
            )
    system = _system(path, file, parts, architecture)
    named = {code: name for name, code in ARCHITECTURES.items()}
    return Sif(path=path.resolve(), architecture=named[architecture], parts=parts, system=system)


def _system(path: Path, file: IO[bytes], parts: tuple[Part, ...], architecture: bytes) -> Part:
    """The root filesystem, or a layer's files, which must be a squashfs of the header's architecture."""
    roles = [struct.pack("<i", role) for role in (_PRIMARY, DATA)]
    systems = [part for part in parts if part.kind == "partition" and part.extra[4:8] in roles]
    if any(part.kind == "OCI index" for part in parts):
        found = "an OCI-SIF of SingularityCE 4, which Apptainer does not start"
        raise _refused(path, found, wanted="a SIF with one root filesystem: singularity pull --no-oci makes one")
    if len(systems) != 1:
        raise _refused(path, f"{len(systems)} root filesystems", wanted="a SIF with one root filesystem")
    filesystem, *_ = _PARTITION.unpack(systems[0].extra[: _PARTITION.size])
    if filesystem != _SQUASHFS or _at(file, systems[0].offset, 4) != b"hsqs":
        raise _refused(path, "another filesystem, or an encrypted one", wanted="a SIF with a squashfs in it")
    if architecture not in ARCHITECTURES.values():
        wanted = " or ".join(f"{name} ({code[:2]!r})" for name, code in ARCHITECTURES.items())
        raise _refused(path, f"architecture {architecture[:2]!r}", wanted=f"a SIF for {wanted}")
    return systems[0]


def _parts(table: bytes) -> Iterator[Part]:
    for described in _DESCRIPTOR.iter_unpack(table):
        kind, used, _, group, _, offset, size, *_, extra = described
        if used:
            name = KINDS.get(kind, f"part of kind {kind:#x}")
            yield Part(kind=name, group=group, offset=offset, size=size, extra=extra)


def _described(
    kind: str, before: bytes, *, start: int, offset: int, size: int, epoch: int, name: str = "", extra: bytes = b""
) -> bytes:
    """A descriptor; `start` is where the part before it ends."""
    number = len(before) // _DESCRIPTOR.size + 1
    places = (offset, size, offset + size - start, epoch, epoch, 0, 0)
    return _DESCRIPTOR.pack(_NUMBERS[kind], True, number, _GROUP, 0, *places, name.encode(), extra)


def _at(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _refused(
    path: Path, found: str, wanted: str = "a SIF, as dray image build and apptainer build make them"
) -> ConfigError:
    return ConfigError("not a usable image", where=path, wanted=wanted, found=found)
