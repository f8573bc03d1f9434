"""Reads the ELF headers of a shared library, without running its code."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MACHINES = {62: "x86_64", 183: "aarch64"}
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRTAB, _SONAME, _RPATH, _RUNPATH = 1, 5, 14, 15, 29
_VERDEF, _VERNEED = 0x6FFFFFFC, 0x6FFFFFFE


class NotElfError(ValueError):
    """The file is not a 64-bit little-endian shared object."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """What the loader needs to know of a library."""

    machine: str
    soname: str
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    needed_versions: dict[str, tuple[str, ...]]
    """The versions that it needs of each other library."""
    versions: frozenset[str]
    """The versions that it defines."""


def read(path: Path) -> Library:
    """Read the file's headers."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise NotElfError(f"{path} is not an ELF file of 64 bits, little-endian")
    try:
        return _Reader(data).library(path)
    except (struct.error, IndexError, StopIteration, RuntimeError, ValueError, OverflowError) as error:
        raise NotElfError(f"{path} is not a complete shared library") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        start, size, count = (*struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54))
        headers = [struct.unpack_from("<IIQQQQQQ", data, start + number * size) for number in range(count)]
        self.loads: list[tuple[int, int, int]] = [
            (at, offset, length) for kind, _, offset, at, _, length, *_ in headers if kind == _LOAD
        ]
        self.dynamic: list[tuple[int, int]] = list(
            self._dynamic(next(header for header in headers if header[0] == _DYNAMIC))
        )
        self.strings = self._offset(self._one(_STRTAB))

    def library(self, path: Path) -> Library:
        machine = struct.unpack_from("<H", self.data, 18)[0]
        soname = self._one(_SONAME)
        paths = [self._text(value) for tag, value in self.dynamic if tag in (_RPATH, _RUNPATH)]
        return Library(
            machine=_MACHINES.get(machine, f"machine {machine}"),
            soname=self._text(soname) if soname else path.name,
            needed=tuple(self._text(value) for tag, value in self.dynamic if tag == _NEEDED),
            runpath=tuple(
                entry.replace("$ORIGIN", str(path.parent)) for one in paths for entry in one.split(":") if entry
            ),
            needed_versions=dict(self._needed_versions(self._one(_VERNEED))),
            versions=frozenset(self._versions(self._one(_VERDEF))),
        )

    def _dynamic(self, header: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        for at in range(header[2], header[2] + header[5], 16):
            tag, value = struct.unpack_from("<qQ", self.data, at)
            if tag == 0:
                return
            yield tag, value

    def _one(self, tag: int) -> int:
        return next((value for found, value in self.dynamic if found == tag), 0)

    def _offset(self, address: int) -> int:
        return next(offset + address - at for at, offset, length in self.loads if at <= address < at + length)

    def _text(self, at: int) -> str:
        begin = self.strings + at
        return self.data[begin : self.data.index(b"\0", begin)].decode()

    def _needed_versions(self, address: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        at = self._offset(address) if address else 0
        while at:
            _, count, file, first, following = struct.unpack_from("<HHIII", self.data, at)
            versions, part = [], at + first
            for _ in range(count):
                _, _, _, name, next_part = struct.unpack_from("<IHHII", self.data, part)
                versions.append(self._text(name))
                part += next_part
            yield self._text(file), tuple(versions)
            at = at + following if following else 0

    def _versions(self, address: int) -> Iterator[str]:
        at = self._offset(address) if address else 0
        while at:
            _, _, _, _, _, first, following = struct.unpack_from("<HHHHIII", self.data, at)
            yield self._text(struct.unpack_from("<I", self.data, at + first)[0])
            at = at + following if following else 0
