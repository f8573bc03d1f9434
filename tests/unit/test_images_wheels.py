"""Wheels: pip's whole command, and pip itself on wheels made here, without a network."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from dray.errors import DrayError
from dray.images import wheels

WHEEL = "tiny-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Where the host's pip looks for wheels: one folder with one wheel."""
    folder = tmp_path / "the host's wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {folder.as_uri()}\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    return folder


def _lock(tmp_path: Path, digest: str) -> Path:
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n")
    return lock


def test_download_command():
    argv = wheels.download_argv(lock=Path("a b/x.lock"), python="3.11", folder=Path("the wheels"))
    assert argv == [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"),
        *("--require-hashes", "--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.11"),
        *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_27_x86_64"),
        *("--platform", "manylinux_2_26_x86_64", "--platform", "manylinux_2_24_x86_64"),
        *("--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64"),
        *("--platform", "manylinux_2_12_x86_64", "--platform", "manylinux_2_5_x86_64"),
        *("--platform", "linux_x86_64"),
        *("--requirement", "a b/x.lock", "--dest", "the wheels"),
    ]


def test_second_fetch_needs_no_index(index, tmp_path):
    lock = _lock(tmp_path, hashlib.sha256((index / WHEEL).read_bytes()).hexdigest())
    folder = tmp_path / "build" / "wheels"
    assert wheels.fetch(lock=lock, python="3.11", folder=folder) is True
    (index / WHEEL).unlink()
    assert wheels.fetch(lock=lock, python="3.11", folder=folder) is False
    assert [path.name for path in folder.iterdir()] == [WHEEL]


def test_damaged_wheel_is_fetched_again(index, tmp_path):
    good = (index / WHEEL).read_bytes()
    lock = _lock(tmp_path, hashlib.sha256(good).hexdigest())
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / WHEEL).write_bytes(good[:-1])
    assert wheels.fetch(lock=lock, python="3.11", folder=folder) is True
    assert (folder / WHEEL).read_bytes() == good


def test_wrong_hash_names_the_package(index, tmp_path):
    got = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    lock = _lock(tmp_path, "0" * 64)
    with pytest.raises(DrayError) as raised:
        wheels.fetch(lock=lock, python="3.11", folder=tmp_path / "wheels")
    found = raised.value.details.pop("found")
    assert "tiny==1.0 from file://" in found
    assert f"Got        {got}" in found
    assert raised.value.details == {
        "where": str(lock),
        "wanted": "every package of the lock, with one of its hashes",
        "fix": "a mirror or a cache hands out another file under this name: pip cache purge, or lock again",
    }


@pytest.mark.parametrize(
    ("package", "fix"),
    [
        ("gone==2.0", "pip config list shows where pip looks; a proxy or a mirror may be missing there"),
        (
            "torch==2.13.0",
            "this lock takes one build of torch, which main registries may not have: show pip the folder or the\n"
            "index that has it, as in: pip config set global.find-links FOLDER",
        ),
    ],
)
def test_missing_package(index, tmp_path, package, fix):
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"{package} --hash=sha256:{'0' * 64}\n")
    with pytest.raises(DrayError) as raised:
        wheels.fetch(lock=lock, python="3.11", folder=tmp_path / "wheels")
    assert raised.value.details == {
        "where": str(lock),
        "wanted": "every package of the lock, with one of its hashes",
        "found": f"ERROR: Could not find a version that satisfies the requirement {package} (from versions: none)\n"
        f"ERROR: No matching distribution found for {package}",
        "fix": fix,
    }


def test_own_wheel_follows_the_sources(tmp_path, monkeypatch):
    checkout = tmp_path / "my work"
    (checkout / "src" / "dray").mkdir(parents=True)
    module = checkout / "src" / "dray" / "__init__.py"
    module.write_text("")
    (checkout / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "dray"\nversion = "1"\n'
    )
    (checkout / "backend.py").write_text(
        "import os, zipfile\n"
        "def build_wheel(folder, *_):\n"
        "    name = 'dray-1-py3-none-any.whl'\n"
        "    with zipfile.ZipFile(os.path.join(folder, name), 'w') as wheel:\n"
        "        wheel.write('src/dray/__init__.py', 'dray/__init__.py')\n"
        "        wheel.writestr('dray-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: dray\\nVersion: 1\\n')\n"
        "        wheel.writestr('dray-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nTag: py3-none-any\\n')\n"
        "        wheel.writestr('dray-1.dist-info/RECORD', '')\n"
        "    return name\n"
    )
    folder = tmp_path / "wheels"

    made = wheels.own(checkout=checkout, folder=folder)
    first = made.stat().st_mtime_ns
    assert wheels.own(checkout=checkout, folder=folder).stat().st_mtime_ns == first

    module.write_text("changed = True\n")
    os.utime(module, (made.stat().st_mtime + 1,) * 2)
    (folder / "dray-0-py3-none-any.whl").touch()
    again = wheels.own(checkout=checkout, folder=folder)
    assert [path.name for path in folder.iterdir()] == ["dray-1-py3-none-any.whl"]
    assert zipfile.ZipFile(again).read("dray/__init__.py") == b"changed = True\n"
