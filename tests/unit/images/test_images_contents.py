"""Looking into an image: what unsquashfs tells, and one that cannot."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dray.cli import image_look
from dray.contract.findings import DrayError, UnfitError
from dray.images.sif import contents
from dray.images.sif import format as sif_format
from dray.images.sif.contents import Entry


@pytest.fixture
def sif(tmp_path) -> Path:
    (tmp_path / "squashfs").write_bytes(b"hsqs" + bytes(200))
    sif_format.write(tmp_path / "squashfs", tmp_path / "a.sif", epoch=1, definition=b"a\n")
    return tmp_path / "a.sif"


# As unsquashfs writes it.
DESCRIBED = (
    b"/ D 1 755 0 0\n"
    b"empty R 1 4755 0 0 0 0 0\nff I 1 600 0 0 f\nhard R 1 644 0 0 3 0 0\nnew\\\nline R 1 644 0 0 2 3 0\n"
    b'nonutf\xff R 1 644 0 0 2 5 0\nnul C 1 644 0 0 1 3\nquo\\"te\\\\back R 1 644 0 0 2 7 0\nsp\\ ace D 1 755 0 0\n'
    b'sp\\ ace/a\\ b L hard\nsp\\ ace/li\\ nk S 1 777 0 0 target with "x" space\nends\\\\\\\\ D 2 755 7 8\n'
    b"older\nunsquashfs R 1 644 0 0 0 0\n"
    b"#\n# START OF DATA - DO NOT MODIFY\n#\nhi\nx\nz\ny\n"
)


def test_names_as_odd_as_they_come():
    stream = io.BytesIO(DESCRIBED)
    plain = {"owner": "0/0", "time": "1"}
    assert {name.decode(errors="replace"): entry for name, entry in contents._described(stream)} == {
        "/": Entry(kind="folder", mode="755", **plain),
        "empty": Entry(kind="file", mode="4755", content="0 0 0", **plain),
        "ff": Entry(kind="socket or pipe", mode="600", content="f", **plain),
        "hard": Entry(kind="file", mode="644", content="3 0 0", size=3, **plain),
        "new\nline": Entry(kind="file", mode="644", content="2 3 0", size=2, **plain),
        "nonutf\ufffd": Entry(kind="file", mode="644", content="2 5 0", size=2, **plain),
        "nul": Entry(kind="device", mode="644", content="1 3", **plain),
        'quo"te\\back': Entry(kind="file", mode="644", content="2 7 0", size=2, **plain),
        "sp ace": Entry(kind="folder", mode="755", **plain),
        "sp ace/a b": Entry(kind="hard link", content="hard"),
        "sp ace/li nk": Entry(kind="link", mode="777", content='target with "x" space', **plain),
        "older\nunsquashfs": Entry(kind="file", mode="644", content="0 0", **plain),
        "ends\\\\": Entry(kind="folder", mode="755", owner="7/8", time="2"),
    }
    assert stream.read() == b"hi\nx\nz\ny\n"


OLD = "SYNTAX: unsquashfs [options] filesystem [directories or files to extract]"
NO_ZSTD = "Filesystem uses zstd compression, this is unsupported by this version"


@pytest.mark.parametrize(
    ("version", "said", "call", "wanted", "found"),
    [
        ("4.4 (2019/08/29)", OLD, "entries", "4.5", "version 4.4"),
        ("4.3", OLD, "sizes", "4.4", "version 4.3"),
        ("4.6.1 (2023/03/25)", NO_ZSTD, "sizes", "4.4", NO_ZSTD),
        ("4.4", "FATAL ERROR: damaged", "sizes", None, "FATAL ERROR: damaged"),
        ("4.10", "FATAL ERROR: damaged", "entries", None, "FATAL ERROR: damaged"),
    ],
)
def test_an_unsquashfs_that_cannot(sif, tmp_path, monkeypatch, version, said, call, wanted, found):
    tool = tmp_path / "bin" / "unsquashfs"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo "unsquashfs version {version}" || echo "{said}" >&2\nexit 1\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    with pytest.raises(DrayError) as raised:
        getattr(contents, call)(sif_format.read(sif))
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
