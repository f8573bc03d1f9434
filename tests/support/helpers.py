"""Where things are, golden files, waiting, and the containers that builds leave."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from shutil import rmtree, which
from tempfile import mkdtemp

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
# What a Python needs of the environment: one of a module finds its own library by the second.
PYTHON = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}

# Also for tests that take all programs off PATH.
DOCKER = which("docker") or "docker"


@cache
def python() -> str:
    """This Python by a path without a space: Inductor's linker takes torch's own folder apart at one."""
    if " " not in sys.prefix:
        return sys.executable
    link = Path(mkdtemp(prefix="dray-tests-")) / "venv"
    atexit.register(rmtree, link.parent)
    link.symlink_to(sys.prefix)
    return str(link / "bin/python")


def golden(name: str | Path, text: str) -> None:
    """Compare with a file of tests/golden, or any other; DRAY_GOLDEN=write writes it. No file has what is random."""
    path = GOLDEN / name
    text = re.sub(r"/tmp/dray-\d+-[0-9a-f]{32}", "/tmp/dray-UID-RANDOM", text)
    text = re.sub(r"/\.cache-\d+", "/.cache-UID", text)
    if os.environ.get("DRAY_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def until(happened: Callable[[], object], told: Callable[[], object] = str) -> None:
    """Wait for what another process does. The limit ends a hang, also on a slow machine, and proves nothing else; what
    is `told` then helps to see why."""
    deadline = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


def section(page: str, *headings: str) -> str:
    """The sections of a page of docs/ with these headings, each up to the next `##`."""
    parts = re.split(r"^(?=## )", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {part.partition("\n")[0]: part for part in parts}
    return "\n".join(found[heading] for heading in headings)


def bash_blocks(text: str) -> str:
    """What a page has in blocks of bash."""
    return "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def runs(pid: int | str) -> bool:
    """Whether this process still does; one that is dead and waits to be reaped does not, and one that was killed may
    for a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def in_builder(
    image: str, *argv: str, volumes: Iterable[str], env: Iterable[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program in the builder's container with the rights of a build, and with paths that the test chooses."""
    from dray.clients import builder_container

    options = [f"--security-opt={name}" for name in (*builder_container.SECURITY, "systempaths=unconfined")]
    options += ["--user={}:{}".format(*builder_container.caller()), "--network=none"]
    options += [*(f"--volume={volume}" for volume in volumes), *(f"--env={variable}" for variable in env)]
    return subprocess.run([DOCKER, "run", "--rm", *options, image, *argv], capture_output=True, text=True, check=False)


def builders(client, folder: Path) -> list[str]:
    """The builder containers that have a file of this folder mounted; other builds may have theirs."""
    found = [
        one for one in client.containers.list(all=True, ignore_removed=True) if one.name.startswith("dray-builder-")
    ]
    return [one.name for one in found if any(folder in Path(mount["Source"]).parents for mount in one.attrs["Mounts"])]
