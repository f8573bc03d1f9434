"""Looking into an image: what unsquashfs tells, and one that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.cli import image as verbs
from dray.contract.findings import DrayError, UnfitError
from dray.images.sif import contents
from dray.images.sif import format as sif_format


@pytest.fixture
def sif(tmp_path) -> Path:
    (tmp_path / "squashfs").write_bytes(b"hsqs" + bytes(200))
    sif_format.write(tmp_path / "squashfs", tmp_path / "a.sif", epoch=1, definition=b"a\n")
    return tmp_path / "a.sif"


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("6", 78),
        ("SYNTAX: unsquashfs [options] filesystem [directories]", 69),  # of 4.3, which has no -offset
        ("Filesystem uses zstd compression, this is unsupported by this version", 69),
    ],
)
def test_an_unsquashfs_that_cannot(sif, tmp_path, monkeypatch, last, code):
    """The last lines of the tool tell what is wrong: with the image, or with an old tool."""
    tool = tmp_path / "bin" / "unsquashfs"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nfor line in 1 2 3 4 5 '{last}'; do echo $line >&2; done\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    with pytest.raises(DrayError) as raised:
        contents.file(sif_format.read(sif), "a")
    assert raised.value.exit_code == code
    assert str(raised.value) == (
        f"the image's files cannot be read\n  where:  {sif}\n"
        "  wanted: squashfs-tools 4.4 or newer, with zstd, and a whole image\n"
        f"  found:  2\n          3\n          4\n          5\n          {last}\n"
        "  fix:    unsquashfs -version: install a newer one, or, with a Docker Engine, take it off PATH\n"
        "          or build or copy the image again"
    )


def test_no_unsquashfs_and_no_docker(sif, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(UnfitError) as raised:
        verbs.inspect(str(sif))
    assert str(raised.value) == (
        "this machine has no unsquashfs, and no Docker Engine to run it in\n"
        "  found:  no Docker Engine runs on this machine\n"
        "  fix:    install apptainer and squashfs-tools\n"
        "          or install Docker Engine and start it, or set DOCKER_HOST"
    )
