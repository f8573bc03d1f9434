"""Signing, with a tool that does what Apptainer does to the file: the image is whole at each moment."""

from __future__ import annotations

import errno
import hashlib
import shutil
import struct
import sys
from pathlib import Path

import pytest

from dray.cli import image as verbs
from dray.contract.findings import DrayError
from dray.images.sif import format as sif_format
from dray.images.sif import record, sign
from dray.images.sif.record import File, Record

KEY = "0123456789ABCDEF0123456789ABCDEF01234567"
NAMES = ["dray-cpu.sif", "dray-cpu.sif.json"]
VARIABLES = ("APPTAINER_KEYSDIR", "SINGULARITY_SYPGPDIR")
# What a signature adds to the table: part 3 of kind 0x4005, of which only the fingerprint matters here.
SIGNATURE = struct.pack("<i?3I7q128s4s20s", 0x4005, True, 3, 0, 0, *[0] * 7, b"", b"", bytes.fromhex(KEY))
TOOL = """#!/bin/sh
printf '%s ' "${{0##*/}}" "$@" "${{APPTAINER_KEYSDIR-unset}}" "${{SINGULARITY_SYPGPDIR-unset}}" >>'{folder}/calls'
echo >>'{folder}/calls'
case "$1" in
sign) {sign} ;;
esac
"""


@pytest.fixture
def sif(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    (tmp_path / "squashfs").write_bytes(b"hsqs" + bytes(200))
    path = folder / "dray-cpu.sif"
    sif_format.write(tmp_path / "squashfs", path, epoch=1, definition=b"a\n")
    record.write(path, known(path))
    whole, row = path.read_bytes(), 4096 + 2 * 585
    (tmp_path / "signed").write_bytes(whole[:row] + SIGNATURE + whole[row + len(SIGNATURE) :])
    return path


def known(sif: Path) -> Record:
    digest = hashlib.sha256(sif.read_bytes()).hexdigest()
    file = File(sha256=digest, size=sif.stat().st_size)
    return Record(variant="cpu", dray="0", base="b", inputs="0" * 64, epoch=1, tools={}, sif=file)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put a tool of this name on the machine, the only one; what it is called with."""

    def put(signing: str = "/bin/cp '{folder}/signed' \"$2\"", *, name: str = "apptainer") -> Path:
        script = tmp_path / "bin" / name
        script.parent.mkdir()
        script.write_text(TOOL.format(folder=tmp_path, sign=signing.format(folder=tmp_path)))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent))
        return tmp_path / "calls"

    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return put


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("name", "keyring", "variables"),
    [("apptainer", ".apptainer/keys", "{} unset"), ("singularity", ".singularity/sypgp", "unset {}")],
)
def test_a_copy_is_signed_and_takes_the_place(sif, tool, name, keyring, variables, terminal, monkeypatch, capsys):
    calls = tool(name=name)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal)
    before, signed = known(sif), (sif.parents[1] / "signed").read_bytes()
    verbs.sign(str(sif))
    digest = hashlib.sha256(signed).hexdigest()
    assert capsys.readouterr().out == f"{sif}\nsha256:{digest}\nsigned with {KEY}\n"
    assert sif.read_bytes() == signed
    assert sif.stat().st_mode & 0o777 == 0o755
    assert record.read(sif) == before.model_copy(update={"sif": File(sha256=digest, size=len(signed)), "signed": KEY})
    assert sorted(path.name for path in sif.parent.iterdir()) == NAMES
    said = variables.format(sif.parents[1] / keyring)
    words = calls.read_text().split()
    assert words[:2] == [name, "sign"]
    assert words[3:] == said.split()
    assert Path(words[2]).parent.parent == sif.parent  # a rename takes it to its place


@pytest.mark.parametrize(
    ("signing", "ended"),
    [
        ('echo half >"$2"; echo no such luck >&2; exit 255', DrayError),
        ('echo half >"$2"', DrayError),
        ('echo half >"$2"; kill -TERM $PPID', KeyboardInterrupt),
    ],
)
def test_what_was_there_stays_where_signing_ends(sif, tool, signing, ended):
    tool(signing)
    before = sif.read_bytes(), record.read(sif)
    with pytest.raises(ended):
        sign.sign(sif_format.read(sif))
    assert (sif.read_bytes(), record.read(sif)) == before
    assert sorted(path.name for path in sif.parent.iterdir()) == NAMES


def test_no_room_for_a_copy(sif, tool, monkeypatch):
    tool()

    def full(_source: Path, to: str) -> None:
        (Path(to) / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left"):
        sign.sign(sif_format.read(sif))
    assert sorted(path.name for path in sif.parent.iterdir()) == NAMES


@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        ("apptainer", {}, "{home}/.apptainer/keys"),
        ("singularity", {}, "{home}/.singularity/sypgp"),
        ("neither", {}, "{home}/.apptainer/keys"),
        ("apptainer", {"SINGULARITY_SYPGPDIR": "/s"}, "/s"),
        ("singularity", {"SINGULARITY_SYPGPDIR": "/s", "APPTAINER_KEYSDIR": ""}, "/s"),
        ("singularity", {"SINGULARITY_SYPGPDIR": "/s", "APPTAINER_KEYSDIR": "/a"}, "/a"),
    ],
)
def test_the_keyring(tool, name, variables, expected, tmp_path, monkeypatch):
    tool(name=name)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert str(sign.keyring()) == expected.format(home=tmp_path)
