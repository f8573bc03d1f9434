"""The SIF file: written with the same bytes everywhere, read with care."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import struct
from pathlib import Path

import pytest

from dray.contract.findings import ConfigError
from dray.images.sif import format as sif_format

EPOCH = 1_700_000_000
SQUASHFS = b"hsqs" + bytes(range(256)) * 48
DEFINITION = b"Bootstrap: docker\nFrom: debian\n"
# Users pin images by digest: this must never change without need.
DIGEST = "49ce6d72d539a1fca3f4fa697278ed08c72849d02a6bef97ce69bceeed65e0c2"
TABLE = 4096
ROW = 585


@pytest.fixture(autouse=True)
def _amd64(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def sif(tmp_path) -> Path:
    return made(tmp_path / "one")


def made(folder: Path, *, metadata: bytes = b'{"data": {}}') -> Path:
    folder.mkdir()
    (folder / "a.squashfs").write_bytes(SQUASHFS)
    sif_format.write(folder / "a.squashfs", folder / "a.sif", epoch=EPOCH, definition=DEFINITION, metadata=metadata)
    return folder / "a.sif"


def test_what_is_written_can_be_read(sif):
    read = sif_format.read(sif)
    assert [(part.kind, part.offset, part.size) for part in read.parts] == [
        ("definition", 32176, len(DEFINITION)),
        ("metadata", 32176 + len(DEFINITION), 12),
        ("partition", 32768, len(SQUASHFS)),
    ]
    assert (read.path, read.architecture) == (sif, "amd64")
    assert read.system == read.parts[2]
    assert sif.read_bytes()[32176:].startswith(DEFINITION)
    assert read.signers() == []
    assert sif.read_bytes()[32768:] == SQUASHFS
    assert sif.stat().st_mode & 0o777 == 0o755


def test_the_same_bytes_wherever_and_whenever(sif, tmp_path):
    other = made(tmp_path / "another place")
    assert hashlib.sha256(sif.read_bytes()).hexdigest() == DIGEST
    assert other.read_bytes() == sif.read_bytes()


def test_the_definition_alone_will_do(tmp_path):
    read = sif_format.read(made(tmp_path / "plain", metadata=b""))
    assert [(part.kind, part.offset) for part in read.parts] == [("definition", 32176), ("partition", 32768)]


def test_another_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert sif_format.read(made(tmp_path / "arm")).architecture == "arm64"


def test_metadata(tmp_path):
    (tmp_path / ".singularity.d").mkdir()
    (tmp_path / ".singularity.d" / "labels.json").write_text('{"a": "b"}')
    assert json.loads(sif_format.metadata(tmp_path, DEFINITION)) == {
        "data": {"attributes": {"labels": {"a": "b"}, "deffile": "Bootstrap: docker\nFrom: debian"}},
        "type": "container",
    }


def changed(sif: Path, offset: int, new: bytes) -> None:
    with sif.open("r+b") as file:
        file.seek(offset)
        file.write(new)


def _nothing(sif: Path) -> None:
    sif.write_bytes(b"")


def _text(sif: Path) -> None:
    sif.write_text("#!/bin/bash\necho hello\n")


def _cut(sif: Path) -> None:
    os.truncate(sif, 40_000)


def _cut_in_the_table(sif: Path) -> None:
    os.truncate(sif, 5000)


SIF = "a SIF, as dray image build and apptainer build make them"
FAULTS = {
    "empty": (_nothing, SIF, "an empty file"),
    "text": (_text, SIF, "a file that begins with b'#!/bin/bash\\necho'"),
    "cut": (
        _cut,
        "a complete SIF; this one was cut short, or its table is damaged",
        "the partition at 32768 has 12292 bytes, and the file has 40000",
    ),
    "cut in the table": (
        _cut_in_the_table,
        SIF,
        "a table of 48 descriptors in 28080 bytes at 4096, in a file of 5000 bytes",
    ),
    "no system": (
        lambda sif: changed(sif, TABLE + 2 * ROW + 201 + 4, b"\4"),
        "a SIF with one root filesystem",
        "0 root filesystems",
    ),
    "two systems": (
        lambda sif: changed(sif, TABLE + 3 * ROW, sif.read_bytes()[TABLE + 2 * ROW : TABLE + 3 * ROW]),
        "a SIF with one root filesystem",
        "2 root filesystems",
    ),
    "encrypted": (
        lambda sif: changed(sif, TABLE + 2 * ROW + 201, b"\5"),
        "a SIF with a squashfs in it",
        "another filesystem, or an encrypted one",
    ),
    "no squashfs": (
        lambda sif: changed(sif, 32768, b"H"),
        "a SIF with a squashfs in it",
        "another filesystem, or an encrypted one",
    ),
    "unknown architecture": (
        lambda sif: changed(sif, 45, b"06"),
        "a SIF for amd64 (b'02') or arm64 (b'04')",
        "architecture b'06'",
    ),
    "endless table": (
        lambda sif: changed(sif, 88, struct.pack("<q", 1 << 40)),
        SIF,
        "a table of 1099511627776 descriptors in 28080 bytes at 4096, in a file of 45060 bytes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rubbish_is_refused(sif, fault):
    spoil, wanted, found = FAULTS[fault]
    spoil(sif)
    with pytest.raises(ConfigError) as raised:
        sif_format.read(sif)
    assert str(raised.value) == (f"not a usable image\n  where:  {sif}\n  wanted: {wanted}\n  found:  {found}")


def test_paths_without_an_image(tmp_path, sif):
    said = []
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "round").symlink_to("round")
    for path in (tmp_path / "none.sif", tmp_path, tmp_path / "pipe", sif / "below", tmp_path / "round"):
        with pytest.raises(ConfigError) as raised:
            sif_format.read(path)
        said.append(str(raised.value))
    assert said == [
        f"the image does not exist\n  wanted: {tmp_path}/none.sif\n"
        "  fix:    make image-cpu builds build/dray-cpu.sif; or name the file of another image",
        f"the image cannot be read\n  where:  {tmp_path}\n  found:  a folder",
        f"the image cannot be read\n  where:  {tmp_path}/pipe\n  found:  a FIFO, not a file",
        f"the image cannot be read\n  where:  {sif}/below\n  found:  Not a directory",
        f"the image cannot be read\n  where:  {tmp_path}/round\n  found:  Too many levels of symbolic links",
    ]


@pytest.mark.seconds
def test_no_changed_byte_of_header_or_table_brings_it_down(sif):
    whole = sif.read_bytes()
    refused = 0
    for offset in (*range(128), *range(TABLE, TABLE + 4 * ROW)):
        for value in (0xFF, 0x7F, 0x00):
            changed(sif, offset, bytes([value]))
            try:
                sif_format.read(sif)
            except ConfigError:
                refused += 1
        changed(sif, offset, whole[offset : offset + 1])
    assert refused > 100
    assert sif_format.read(sif).architecture == "amd64"
