"""Host libraries compared with an image by the loader: small real libraries, made byte by byte."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from dray.checks import host_libraries

Write = Callable[..., Path]


@pytest.fixture
def image(tmp_path: Path, library: Write) -> list[str]:
    """The folders of an image with a libc of 2.36, and with its own libz."""
    folder = tmp_path / "image"
    library(folder / "libc.so.6", "libc.so.6", gives=("libc.so.6", "GLIBC_2.2.5", "GLIBC_2.9", "GLIBC_2.36"))
    library(folder / "libz.so.1", "libz.so.1")
    return [str(folder)]


def rows(image: list[str], *libraries: Path, configured: str = "") -> list[host_libraries.Library]:
    with (
        patch.object(host_libraries, "image_folders", lambda: image),
        patch.dict(os.environ, LD_LIBRARY_PATH=configured),
    ):
        return host_libraries.check(libraries)


@pytest.mark.parametrize(
    "data", [b"", b"#!/bin/bash\n", b"\x7fELF\x02\x01" + b"\xff" * 90, b"\x7fELF\x01\x01" + b"\0" * 90]
)
def test_a_file_that_is_no_library_is_a_problem_and_no_traceback(tmp_path: Path, data: bytes, image: list[str]) -> None:
    path = tmp_path / "libx.so"
    path.write_bytes(data)
    (row,) = rows(image, path)
    assert len(row.problems) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the libraries are made for x86_64")
class TestFit:
    def test_one_that_fits(self, tmp_path: Path, image: list[str], library: Write) -> None:
        wants = {"libc.so.6": ("GLIBC_2.36",)}
        (row,) = rows(image, library(tmp_path / "host/libcxi.so.1", "libcxi.so.1", needed=["libc.so.6"], wants=wants))
        assert (row.problems, row.in_image) == ([], "")

    def test_one_for_a_newer_glibc(self, tmp_path: Path, image: list[str], library: Write) -> None:
        wants = {"libc.so.6": ("GLIBC_2.2.5", "GLIBC_2.38")}
        (row,) = rows(image, library(tmp_path / "host/libcxi.so.1", "libcxi.so.1", needed=["libc.so.6"], wants=wants))
        assert row.problems == [f"needs GLIBC_2.38 of libc.so.6; {image[0]}/libc.so.6 lacks it"]

    def test_a_plugin_linked_with_another_libfabric(self, tmp_path: Path, image: list[str], library: Write) -> None:
        fabric = library(tmp_path / "host/libfabric.so.1", "libfabric.so.1", gives=("FABRIC_1.0", "FABRIC_1.6"))
        plugin = library(
            tmp_path / "plugin/librccl-net.so", "librccl-net.so",
            needed=["libfabric.so.1"], wants={"libfabric.so.1": ("FABRIC_1.0", "FABRIC_1.8")},
        )  # fmt: skip
        assert [row.problems for row in rows(image, fabric, plugin)] == [
            [],
            [f"needs FABRIC_1.8 of libfabric.so.1; {fabric} lacks it"],
        ]

    def test_one_whose_own_need_was_not_bound(self, tmp_path: Path, image: list[str], library: Write) -> None:
        (row,) = rows(image, library(tmp_path / "host/libfabric.so.1", "libfabric.so.1", needed=["libnone.so.4"]))
        assert row.problems == []
        assert row.unresolved == ["needs libnone.so.4, which is neither in the image nor bound"]

    def test_one_whose_need_has_no_versions_is_accepted_as_the_loader_does(
        self, tmp_path: Path, image: list[str], library: Write
    ) -> None:
        wants = {"libz.so.1": ("ZLIB_1.2.9",)}
        (row,) = rows(image, library(tmp_path / "host/libx.so.1", "libx.so.1", needed=["libz.so.1"], wants=wants))
        assert (row.problems, row.unresolved) == ([], [])

    def test_two_copies_of_which_one_fits(self, tmp_path: Path, image: list[str], library: Write) -> None:
        """Which copy is loaded depends on the engine's version."""
        old = library(tmp_path / "host/libc.so.6", "libc.so.6", gives=("GLIBC_2.28",))
        wants = {"libc.so.6": ("GLIBC_2.36",)}
        new = library(tmp_path / "host/libx.so.1", "libx.so.1", needed=["libc.so.6"], wants=wants)
        assert rows(image, old, new)[1].problems == []

    def test_the_images_library_path_is_searched(self, tmp_path: Path, image: list[str], library: Write) -> None:
        library(tmp_path / "more" / "libicu.so.7", "libicu.so.7")
        path = library(tmp_path / "host/libx.so.1", "libx.so.1", needed=["libicu.so.7"])
        (row,) = rows(image, path, configured=str(tmp_path / "more"))
        assert row.unresolved == []

    def test_one_that_has_it_beside_itself(self, tmp_path: Path, image: list[str], library: Write) -> None:
        path = library(tmp_path / "host/libfabric.so.1", "libfabric.so.1", needed=["libnone.so.4"], runpath="$ORIGIN")
        library(tmp_path / "host/libnone.so.4", "libnone.so.4")
        assert rows(image, path)[0].unresolved == []

    def test_one_for_another_machine(self, tmp_path: Path, image: list[str], library: Write) -> None:
        (row,) = rows(image, library(tmp_path / "host/libcxi.so.1", "libcxi.so.1", machine=183))
        assert len(row.problems) == 1

    def test_the_host_s_driver_of_a_card_and_the_image_s_libibverbs(
        self, tmp_path: Path, image: list[str], library: Write
    ) -> None:
        """rdma-core's own rule: another private version, and no card is there, without a word."""
        gives = ("libibverbs.so.1", "IBVERBS_1.0", "IBVERBS_1.14", "IBVERBS_PRIVATE_34")
        own = library(Path(image[0], "libibverbs.so.1"), "libibverbs.so.1", gives=gives)
        drivers = []
        for version in (34, 57):
            wants = {"libibverbs.so.1": ("IBVERBS_1.0", f"IBVERBS_PRIVATE_{version}")}
            name = f"libmlx5-rdmav{version}.so"
            drivers.append(library(tmp_path / "host" / name, name, needed=["libibverbs.so.1"], wants=wants))
        problem = f"needs IBVERBS_PRIVATE_57 of libibverbs.so.1; {own} lacks it"
        assert [row.problems for row in rows(image, *drivers)] == [[], [problem]]

    def test_which_copy_the_image_has(self, tmp_path: Path, image: list[str], library: Write) -> None:
        path = library(tmp_path / "host/libz.so.1", "libz.so.1")
        own = library(tmp_path / "more/libz.so.1", "libz.so.1")
        assert rows(image, path)[0].in_image == f"{image[0]}/libz.so.1"
        assert rows(image, path, configured=f"{own.parent}:/.singularity.d/libs")[0].in_image == str(own)


def test_as_a_program_it_answers_json_and_unfit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "libx.so"
    path.write_bytes(b"no library")
    assert host_libraries.main([str(path)]) == 69
    (row,) = json.loads(capsys.readouterr().out)
    assert row["path"] == str(path)
