"""Looking into an image: what unsquashfs tells, and one that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.cli import image_look
from dray.contract.findings import DrayError, UnfitError
from dray.images.sif import contents
from dray.images.sif import format as sif_format


@pytest.fixture
def sif(tmp_path) -> Path:
    (tmp_path / "squashfs").write_bytes(b"hsqs" + bytes(200))
    sif_format.write(tmp_path / "squashfs", tmp_path / "a.sif", epoch=1, definition=b"a\n")
    return tmp_path / "a.sif"


OLD = "SYNTAX: unsquashfs [options] filesystem [directories or files to extract]"
NO_ZSTD = "Filesystem uses zstd compression, this is unsupported by this version"


@pytest.mark.parametrize(
    ("version", "said", "wanted", "found"),
    [
        ("4.3", OLD, "4.4", "version 4.3"),
        ("4.6.1 (2023/03/25)", NO_ZSTD, "4.4", NO_ZSTD),
        ("4.4", "FATAL ERROR: damaged", None, "FATAL ERROR: damaged"),
        ("4.10", "FATAL ERROR: damaged", None, "FATAL ERROR: damaged"),
    ],
)
def test_an_unsquashfs_that_cannot(sif, tmp_path, monkeypatch, version, said, wanted, found):
    tool = tmp_path / "bin" / "unsquashfs"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo "unsquashfs version {version}" || echo "{said}" >&2\nexit 1\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    with pytest.raises(DrayError) as raised:
        contents.file(sif_format.read(sif), "a")
    damaged = (
        f"the image's files cannot be read\n  where:  {sif}\n  found:  {found}\n  fix:    build or copy the image again"
    )
    unfit = (
        f"this machine's unsquashfs cannot read the image\n  where:  {tool}\n"
        f"  wanted: squashfs-tools {wanted} or newer, with zstd\n  found:  {found}\n"
        "  fix:    install a newer one; or, with a Docker Engine, take it off PATH: dray then runs one in a container"
    )
    assert (str(raised.value), raised.value.exit_code) == ((unfit, 69) if wanted else (damaged, 78))


def test_no_unsquashfs_and_no_docker(sif, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(UnfitError) as raised:
        image_look.inspect(str(sif))
    assert str(raised.value) == (
        "this machine has no unsquashfs, and no Docker Engine to run it in\n"
        "  found:  no Docker Engine runs on this machine\n"
        "  fix:    install apptainer and squashfs-tools\n"
        "          or install Docker Engine and start it, or set DOCKER_HOST"
    )
