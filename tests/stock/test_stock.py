"""README's `make image-cpu` on a machine that nobody has prepared, with no option: from the registry to the SIF."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from functools import cache

import pytest

from helpers import ROOT
from stock import walk
from stock.machine import Ended
from stock.walk import Walk


@cache
def _missing() -> str | None:
    if os.getuid() != 0:
        return "only root can mount and be another user"
    programs = ("dockerd", "docker-registry", "mmdebstrap", "gpg", "dpkg-deb", "openssl", "nsenter", "setpriv")
    missing = [program for program in programs if not shutil.which(program)]
    return f"not installed: {', '.join(missing)}" if missing else None


@pytest.fixture(scope="module")
def stock() -> Iterator[Walk]:
    if why := _missing():
        pytest.fail(f"DRAY_TEST_ALL=1, and {why}") if os.environ.get("DRAY_TEST_ALL") == "1" else pytest.skip(why)
    with walk.prepared(ROOT / "build/stock-cache", ROOT / "build/stock") as prepared:
        yield prepared
        prepared.write_table()


@pytest.fixture(scope="module")
def built(stock: Walk) -> Ended:
    """The command, as README writes it; a careful user's umask."""
    ended = stock.typed("make image-cpu", log="image-cpu", umask="077")
    assert ended.code == 0, ended.out
    return ended


def test_the_checkout_differs_from_head_in_digests_alone(stock: Walk) -> None:
    assert walk.differences(stock.checkout) == []
    assert walk.changed(stock.checkout) >= {"containers/cluster/Containerfile", "containers/cpu/image.toml"}


def test_one_command_makes_the_image(stock: Walk, built: Ended) -> None:
    assert re.search(r"build/dray-cpu\.sif'?  \d+ MB  sha256:[0-9a-f]{64}  \(\d+ s\)\n", built.out)
    program = "import dray, torch, transformers; print(torch.__version__, torch.ones(2).sum().item())"
    command = f"apptainer exec --cleanenv /image.sif python3 -c '{program}'"
    security = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    ran = stock.typed(
        f'docker run --rm --network none --user "$(id -u):$(id -g)" {security} '
        f'--volume "$PWD/build/dray-cpu.sif:/image.sif:ro" dray:builder {command}',
        log="image-runs",
    )
    assert ran.code == 0, ran.out
    assert ran.out.splitlines()[-1] == "2.13.0+cpu 2.0"


def test_the_second_time_all_is_found(stock: Walk, built: Ended) -> None:
    before = len(stock.seen)
    again = stock.typed("make image-cpu", log="image-cpu-again")
    assert again.code == 0, again.out
    assert "found, built from the same inputs" in again.out
    assert again.seconds < 10
    assert stock.seen[before:] == []


def test_what_the_mirror_dropped_and_nothing_else_came_from_the_archive(stock: Walk, built: Ended) -> None:
    files = {request.path for request in stock.seen if request.host == walk.ARCHIVE and "/pool/" in request.path}
    stamp = (stock.checkout / "containers/debian-amd64.lock").read_text().splitlines()[0].removeprefix("# archive ")
    names = {path.rpartition("/")[2].partition("_")[0] for path in files}
    assert names == {walk.GONE, *stock.debian.hashes}
    assert {path.split("/")[3] for path in files} == {stamp}


def test_the_wheel_of_torch_came_from_the_index_that_image_toml_names(stock: Walk, built: Ended) -> None:
    (wheel,) = (request for request in stock.seen if request.path.endswith(".whl") and request.status == 200)
    assert wheel.host == stock.index
    assert "/torch-2.13.0+cpu-" in wheel.path
