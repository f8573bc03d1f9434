"""What the tests share: the real parts where they are there, and one line a part that says why it is not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALL = os.environ.get("DRAY_TEST_ALL") == "1"


def _engine() -> str | None:
    from dray import dockerd
    from dray.errors import DrayError

    try:
        dockerd.client().close()
    except DrayError as error:
        return f"{error.problem} ({error.details.get('fix', '')})"
    return None


def _docker_image() -> str | None:
    from dray import dockerd

    client = dockerd.client()
    try:
        return None if client.images.list("dray:cpu") else "there is no image dray:cpu (make image-cpu-docker)"
    finally:
        client.close()


def _sif() -> str | None:
    return None if (ROOT / "build" / "dray-cpu.sif").exists() else "there is no build/dray-cpu.sif (make image-cpu)"


def _cluster() -> str | None:
    from dray import dockerd
    from dray.cluster.desk import Desk

    client = dockerd.client()
    try:
        health = Desk(client).look()
    finally:
        client.close()
    return None if health is not None else "no cluster is up (make cluster)"


def _torch() -> str | None:
    from importlib.util import find_spec

    return None if find_spec("torch") else "the training stack is not installed (make demo installs it)"


def _shell() -> str | None:
    return None if shutil.which("shellcheck") else "shellcheck is not installed (Debian: apt-get install shellcheck)"


# What a marker needs, in the order in which it is looked at.
NEEDS: dict[str, tuple[Callable[[], str | None], ...]] = {
    "docker": (_engine,),
    "docker_image": (_engine, _docker_image),
    "sif": (_sif,),
    "cluster": (_engine, _cluster, _sif),
    "torch": (_torch,),
    "shellcheck": (_shell,),
}


@cache
def missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None when they can."""
    return next((why for look in NEEDS[marker] if (why := look())), None)


def pytest_configure(config: pytest.Config) -> None:
    """Markers are the table's keys."""
    for marker in NEEDS:
        config.addinivalue_line("markers", f"{marker}: runs only where this part is there")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A missing part skips the test, or fails it when all was asked for."""
    for marker in NEEDS:
        if item.get_closest_marker(marker) and (why := missing(marker)):
            if ALL:
                pytest.fail(f"DRAY_TEST_ALL=1, and {why}", pytrace=False)
            pytest.skip(f"{marker}: {why}")


@pytest.fixture(scope="session")
def desk():
    """The cluster on this machine."""
    from dray import dockerd
    from dray.cluster.desk import Desk

    client = dockerd.client()
    yield Desk(client)
    client.close()


@pytest.fixture
def sif() -> Path:
    """The CPU image as a SIF."""
    return ROOT / "build" / "dray-cpu.sif"


@pytest.fixture
def docker_image() -> str:
    """The CPU image in Docker."""
    return "dray:cpu"


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT
