"""What the tests share: the real parts where they are there, and one line a part that says why it is not."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

from helpers import ROOT

ALL = os.environ.get("DRAY_TEST_ALL") == "1"


def _engine() -> str | None:
    from dray.clients import docker
    from dray.contract.findings import DrayError

    try:
        docker.client().close()
    except DrayError as error:
        return f"{error.problem} ({error.details.get('fix', '')})"
    return None


def _docker_image() -> str | None:
    from dray.clients import docker

    client = docker.client()
    try:
        return None if client.images.list("dray:cpu") else "there is no image dray:cpu (make image-cpu-docker)"
    finally:
        client.close()


def _sif() -> str | None:
    return None if (ROOT / "build" / "dray-cpu.sif").exists() else "there is no build/dray-cpu.sif (make image-cpu)"


def _cluster() -> str | None:
    from dray.clients import docker
    from dray.cluster.local import LocalCluster

    client = docker.client()
    try:
        health = LocalCluster(client).health()
    finally:
        client.close()
    return None if health is not None else "no cluster is up (make cluster)"


def _torch() -> str | None:
    from importlib.util import find_spec

    return None if find_spec("torch") else "the training stack is not installed (make demo installs it)"


def _triton() -> str | None:
    from importlib.util import find_spec

    return None if find_spec("triton") else "triton is not installed (make test installs it)"


def _deepspeed() -> str | None:
    """Beside torch here, or in the image."""
    from importlib.util import find_spec

    return _torch() or (None if find_spec("deepspeed") else _engine() or _docker_image())


def _shell() -> str | None:
    return None if shutil.which("shellcheck") else "shellcheck is not installed (Debian: apt-get install shellcheck)"


def _chromium() -> str | None:
    import browser

    return None if browser.program() else "chromium is not installed (Debian: apt-get install chromium-headless-shell)"


def _tmpfs() -> str | None:
    """A small disk, which root alone can make, and not in every container."""
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            subprocess.run(["umount", folder], check=True)
            return None
    return f"this user cannot mount a tmpfs ({tried.stderr.strip()})"


# What a marker needs, in the order in which it is looked at.
NEEDS: dict[str, tuple[Callable[[], str | None], ...]] = {
    "docker": (_engine,),
    "docker_image": (_engine, _docker_image),
    "sif": (_sif,),
    "cluster": (_engine, _cluster, _sif),
    "torch": (_torch,),
    "triton": (_triton,),
    "deepspeed": (_deepspeed,),
    "shellcheck": (_shell,),
    "tmpfs": (_tmpfs,),
    "chromium": (_chromium,),
}


@cache
def missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None when they can."""
    return next((why for look in NEEDS[marker] if (why := look())), None)


def pytest_configure(config: pytest.Config) -> None:
    """Markers are the table's keys."""
    for marker in NEEDS:
        config.addinivalue_line("markers", f"{marker}: runs only where this part is there")
    config.addinivalue_line(
        "markers",
        "slow: one more combination of what others run, or minutes for one thing; .ci/run takes a twentieth each day",
    )
    config.addinivalue_line(
        "markers", "seconds: starts processes, and its cases take half a second or more; `make quick` leaves it out"
    )
    config.addinivalue_line("markers", "hostile(group): a hostile or unlucky case, which `make hostile` counts")
    # As in a terminal, where nohup or a shell's & has started this: what a process ignores, all that it starts ignores.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    if measured := os.environ.get("COVERAGE_PROCESS_CONFIG"):  # make coverage
        _measure_subprocesses(measured)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mark `slow` stays on a test, its own or its class's, unless its day is DRAY_TEST_DAY (0 to 19)."""
    day = os.environ.get("DRAY_TEST_DAY")
    slow = [item for item in items if item.get_closest_marker("slow")]
    for node in {node for item in slow for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if mark.name != "slow"]
    for item in slow:
        if str(crc32(item.nodeid.encode()) % 20) != day:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Each process of a test has one thread, as a rank has: threads that wait for a busy core keep another busy."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make hostile` wants a table."""
    parser.addoption("--hostile", metavar="PAGE", help="put the table of hostile cases, by group, into this page too")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Hostile cases by group: good is what a test asks for, poor a known weakness (xfail), bad a failure."""
    page = config.getoption("--hostile")
    if not page:
        return
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome, column in (("passed", "good"), ("xfailed", "poor"), ("failed", "bad"), ("error", "bad")):
        for report in terminalreporter.stats.get(outcome, ()):
            told = dict(report.user_properties)
            counts[told.get("group", "other")][column] += told.get("cases", 1)
    counts["all"] = sum(counts.values(), Counter())
    table = "| group | tried | good | poor | bad |\n|---|---:|---:|---:|---:|\n"
    for group, found in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        cells = (found.total(), found["good"], found["poor"], found["bad"])
        table += f"| {group} | {' | '.join(f'{cell:,}' for cell in cells)} |\n"
    terminalreporter.write(f"\n{table}")
    begin, end = "<!-- make hostile -->\n", "<!-- end -->\n"
    before, _, rest = Path(page).read_text().partition(begin)
    Path(page).write_text(before + begin + table + end + rest.partition(end)[2])


def _measure_subprocesses(config: str) -> None:
    """Tests hand in whole environments, in which coverage would not find itself."""
    start = subprocess.Popen.__init__

    def started(self, *args, env=None, **kwargs) -> None:
        start(self, *args, env=env if env is None else {**env, "COVERAGE_PROCESS_CONFIG": config}, **kwargs)

    subprocess.Popen.__init__ = started


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A missing part skips the test, or fails it when all was asked for."""
    if hostile := item.get_closest_marker("hostile"):
        item.user_properties.append(("group", hostile.args[0]))
    for marker in NEEDS:
        if item.get_closest_marker(marker) and (why := missing(marker)):
            if ALL:
                pytest.fail(f"DRAY_TEST_ALL=1, and {why}", pytrace=False)
            pytest.skip(f"{marker}: {why}")


@pytest.fixture(scope="session")
def cluster():
    """The cluster on this machine."""
    from dray.clients import docker
    from dray.cluster.local import LocalCluster

    client = docker.client()
    yield LocalCluster(client)
    client.close()


@pytest.fixture(scope="session")
def sif() -> Path:
    """The CPU image as a SIF."""
    return ROOT / "build" / "dray-cpu.sif"


@pytest.fixture
def docker_image() -> str:
    """The CPU image in Docker."""
    return "dray:cpu"


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def library() -> Callable[..., Path]:
    """Writes a small real shared library."""
    return _library


def _library(
    path: Path,
    soname: str,
    *,
    needed: Sequence[str] = (),
    wants: Mapping[str, Sequence[str]] | None = None,
    gives: Sequence[str] = (),
    runpath: str = "",
    machine: int = 62,
) -> Path:
    """An ELF shared object with one loadable part, where an address is an offset, and no code."""
    strings = bytearray(b"\0")

    def text(value: str) -> int:
        strings.extend(value.encode() + b"\0")
        return len(strings) - len(value.encode()) - 1

    tags = [(1, text(name)) for name in needed] + [(14, text(soname))]
    tags += [(29, text(runpath))] if runpath else []
    needs = b""
    for number, (name, versions) in enumerate((wants or {}).items(), 1):
        following = (16 + 16 * len(versions)) if number < len(wants or {}) else 0
        needs += struct.pack("<HHIII", 1, len(versions), text(name), 16, following)
        for index, version in enumerate(versions, 1):
            needs += struct.pack("<IHHII", _hash(version), 0, 2, text(version), 16 if index < len(versions) else 0)
    gives_ = b""
    for index, version in enumerate(gives, 1):
        gives_ += struct.pack("<HHHHIII", 1, 0, index, 1, _hash(version), 20, 28 if index < len(gives) else 0)
        gives_ += struct.pack("<II", text(version), 0)
    begin = 64 + 2 * 56
    places = {}
    data = b""
    for name, part in (("strings", bytes(strings)), ("needs", needs), ("gives", gives_)):
        places[name] = begin + len(data)
        data += part + b"\0" * (-len(part) % 16)
    tags += [(5, places["strings"])]
    tags += [(0x6FFFFFFE, places["needs"])] if needs else []
    tags += [(0x6FFFFFFC, places["gives"])] if gives_ else []
    tags += [(0x6FFFFFF0, places["strings"])]  # the loader wants to know the version of each symbol, and there is none
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in (*tags, (0, 0)))
    at, total = begin + len(data), begin + len(data) + len(dynamic)
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    head += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    headers = struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, total, total, 4096)
    headers += struct.pack("<IIQQQQQQ", 2, 6, at, at, at, len(dynamic), len(dynamic), 8)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(head + headers + data + dynamic)
    return path


def _hash(name: str) -> int:
    """By which the loader compares versions."""
    value = 0
    for letter in name.encode():
        value = (value << 4) + letter
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value
