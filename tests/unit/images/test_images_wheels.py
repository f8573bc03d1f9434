"""Wheels: pip's whole command, and pip itself on wheels made here, without a network."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from dray.config import mirrors
from dray.config.image_definition import Image, Vendor
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images.fetch import pip, wheels

INDEX = "https://download.pytorch.org/whl/rocm6.4"
NOWHERE = "ERROR: No matching distribution found for"


def wheel(folder: Path, name: str, version: str = "1.0", *, tag: str = "py3-none-any", body: str = "") -> str:
    """Put a wheel into the folder; its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{name}.py", body)
        made.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        made.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        made.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Where the host's pip looks for wheels: one folder."""
    folder = tmp_path / "the host's wheels"
    folder.mkdir()
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {folder.as_uri()}\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    return folder


@dataclass(frozen=True)
class Served:
    """A folder that a web server shows: an index in each of own/ and vendor/; and each path that was asked for."""

    folder: Path
    asked: list[str]
    config: Path

    def add(self, index: str, name: str, version: str = "1.0", body: str = "") -> str:
        digest = wheel(self.folder / index / name, name, version, body=body)
        (file,) = (self.folder / index / name).glob("*.whl")
        link = f'<a href="{quote(file.name)}#sha256={digest}">{file.name}</a>'
        (self.folder / index / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
        return digest


@pytest.fixture
def fetch(tmp_path):
    """Fetch what these lines pin into build/wheels; the names that come out."""

    def fetch(*locks: str, vendors: tuple[Vendor, ...] = (), own: Path | None = None) -> list[str]:
        paths = []
        for number, text in enumerate(locks):
            paths.append(tmp_path / f"{number}.lock")
            paths[-1].write_text(text)
        image = Image(variant="rocm", base=f"debian@sha256:{'0' * 64}", python="3.11", vendor=list(vendors))
        found = wheels.fetch(locks=paths, image=image, folder=tmp_path / "wheels", wheels=own, say=said.append)
        assert all(path.is_file() for path in found)
        return [str(path.relative_to(tmp_path)) for path in found]

    said: list[str] = []
    fetch.said = said
    return fetch


def pin(name: str, digest: str, version: str = "1.0") -> str:
    return f"{name}=={version} \\\n    --hash=sha256:{'1' * 64} \\\n    --hash=sha256:{digest}\n"


def vendor(version: str, digest: str) -> Vendor:
    return Vendor(name="torch", version=version, sha256=[digest], index=INDEX)


def test_download_command():
    argv = pip.download_argv(requirements=Path("a b/x"), python="3.11", folder=Path("the wheels"))
    machine = platform.machine()
    platforms = [f"manylinux_2_{glibc}" for glibc in range(28, 4, -1)]
    platforms += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
    assert argv == [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"),
        *("--progress-bar", "off", "--require-hashes", "--only-binary", ":all:", "--no-binary", "deepspeed"),
        *("--no-build-isolation", "--use-pep517", "--implementation", "cp", "--python-version", "3.11"),
        *(word for name in platforms for word in ("--platform", f"{name}_{machine}")),
        *("--requirement", "a b/x", "--dest", "the wheels"),
    ]


def test_second_fetch_needs_no_index(index, fetch):
    lock = pin("tiny", wheel(index, "tiny"))
    assert fetch(lock) == ["wheels/tiny-1.0-py3-none-any.whl"]
    (index / "tiny-1.0-py3-none-any.whl").unlink()
    assert fetch(lock) == ["wheels/tiny-1.0-py3-none-any.whl"]
    assert fetch.said == ["dray: fetch 1 of 1 packages"]


def test_exactly_the_files_of_the_locks(index, fetch, tmp_path):
    stored = tmp_path / "wheels"
    other = "linux_sparc"
    digests = [wheel(stored, "tiny", tag=f"cp311-cp311-{system}") for system in (f"linux_{platform.machine()}", other)]
    wheel(stored, "tiny", "0.9")
    wheel(stored, "former")
    a_tool = pin("a-tool", wheel(index, "a_tool"))
    tiny = f"tiny==1.0 --hash=sha256:{digests[0]} --hash=sha256:{digests[1]}\n"
    assert fetch(tiny, a_tool + tiny) == [
        "wheels/a_tool-1.0-py3-none-any.whl",
        f"wheels/tiny-1.0-cp311-cp311-linux_{platform.machine()}.whl",
    ]


def test_damaged_wheel_is_fetched_again(index, fetch, tmp_path):
    lock = pin("tiny", wheel(index, "tiny"))
    wheel(tmp_path / "wheels", "tiny", body="half")
    (name,) = fetch(lock)
    assert (tmp_path / name).read_bytes() == (index / "tiny-1.0-py3-none-any.whl").read_bytes()


@pytest.mark.seconds
def test_sources_are_fetched_and_not_run(index, fetch):
    files = {"PKG-INFO": "Metadata-Version: 2.1\nName: deepspeed\nVersion: 1.0\n", "setup.py": "raise SystemExit(9)\n"}
    with tarfile.open(index / "deepspeed-1.0.tar.gz", "w:gz") as made:
        for name, text in files.items():
            about = tarfile.TarInfo(f"deepspeed-1.0/{name}")
            about.size = len(text)
            made.addfile(about, io.BytesIO(text.encode()))
    digest = hashlib.sha256((index / "deepspeed-1.0.tar.gz").read_bytes()).hexdigest()
    assert fetch(pin("deepspeed", digest)) == ["wheels/deepspeed-1.0.tar.gz"]


def test_wrong_hash_names_the_package(index, fetch, tmp_path):
    got = wheel(index, "tiny")
    with pytest.raises(DrayError) as raised:
        fetch(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    found = raised.value.finding.found.splitlines()
    assert found[0].startswith("    tiny==1.0 from file://")
    assert found[1:] == [f"        Expected sha256 {'0' * 64}", f"             Got        {got}"]
    assert raised.value.problem == "a fetched file does not match its locked hash"
    assert raised.value.finding.fix == (
        "pip cache purge; if a mirror has another file under this name, lock again: dray image lock VARIANT"
    )
    assert list((tmp_path / "wheels").iterdir()) == []


def test_package_that_pip_does_not_find(index, fetch):
    gone = pin("gone", "0" * 64, "2.0")
    for minor in range(20):
        wheel(index, "gone", f"1.{minor}")
    with pytest.raises(UnfitError) as raised:
        fetch(gone)
    assert raised.value.details == {
        "wanted": f"a wheel for Python 3.11 on {platform.machine()}",
        "found": "ERROR: Could not find a version that satisfies the requirement gone==2.0 (from versions: 1.19)\n"
        f"{NOWHERE} gone==2.0",
        "fix": "pip config list shows where pip looks: a proxy or a mirror may be missing",
    }


@pytest.mark.seconds
def test_vendors_wheel_that_is_missing_ends_it_at_once(index, fetch, tmp_path):
    wheel(index, "torch", "2.8.0")
    lock = pin("tiny", wheel(index, "tiny")) + pin("torch", "0" * 64, "2.8.0") + pin("triton-rocm", "1" * 64, "3.4.0")
    triton = Vendor(name="triton-rocm", version="3.4.0", sha256=["1" * 64], index=INDEX)
    with pytest.raises(UnfitError) as raised:
        fetch(lock, vendors=(vendor("2.8.0+rocm6.4", "0" * 64), triton))
    assert raised.value.problem == "pip cannot find a locked file"
    assert raised.value.details == {
        "where": INDEX,
        "wanted": f"torch-2.8.0+rocm6.4-cp311-cp311-*_{platform.machine()}.whl\n"
        f"triton_rocm-3.4.0-cp311-cp311-*_{platform.machine()}.whl",
        "found": "ERROR: Could not find a version that satisfies the requirement torch==2.8.0+rocm6.4 "
        f"(from versions: 2.8.0)\n{NOWHERE} torch==2.8.0+rocm6.4",
        "fix": f'if only a mirror can be reached: "{INDEX}" = "https://..." below [mirrors] in {mirrors.path()}\n'
        "or put the files into a folder: make image-rocm WHEELS=FOLDER\n"
        "or, without a network, make a bundle on a machine with one: dray image bundle rocm",
    }
    assert list((tmp_path / "wheels").iterdir()) == []


@pytest.fixture
def served(tmp_path, monkeypatch) -> Iterator[Served]:
    """A web server with the user's own index and, by the user's mirrors, a vendor's."""
    folder = tmp_path / "served"
    folder.mkdir()
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    config, mirror = tmp_path / "pip.conf", tmp_path / "mirrors.toml"
    config.write_text(f"[global]\nindex-url = {address}/own\nretries = 0\n")
    mirror.write_text(f'[mirrors]\n"{INDEX}" = "{address}/vendor"\n')
    mirror.chmod(0o600)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("DRAY_MIRRORS", str(mirror))
    yield Served(folder, asked, config)
    server.shutdown()
    server.server_close()


@pytest.mark.seconds
def test_a_vendors_wheel_comes_from_its_index_alone(served, fetch):
    """The user's own index is asked first; the vendor's for nothing else, and the configuration stays as it was."""
    before = served.config.read_text()
    tiny, torch = served.add("own", "tiny"), served.add("vendor", "torch", "2.8.0+rocm6.4")
    served.add("vendor", "tiny", body="another")
    lock = pin("tiny", tiny) + pin("torch", torch, "2.8.0")
    vendors = (vendor("2.8.0+rocm6.4", torch),)
    assert fetch(lock, vendors=vendors) == [
        "wheels/tiny-1.0-py3-none-any.whl",
        "wheels/torch-2.8.0+rocm6.4-py3-none-any.whl",
    ]
    pages = list(dict.fromkeys(path for path in served.asked if path.endswith("/")))
    assert pages == ["/own/torch/", "/vendor/torch/", "/own/tiny/"]
    assert served.config.read_text() == before


@pytest.mark.seconds
def test_a_users_own_index_wins_over_the_vendors(served, fetch):
    torch = served.add("own", "torch", "2.8.0+rocm6.4")
    assert fetch(pin("torch", torch, "2.8.0"), vendors=(vendor("2.8.0+rocm6.4", torch),))
    assert not [path for path in served.asked if path.startswith("/vendor")]


@pytest.mark.seconds
def test_a_vendors_index_with_another_file_is_refused(served, fetch):
    torch = served.add("vendor", "torch", "2.8.0+rocm6.4")
    with pytest.raises(DrayError, match="a fetched file does not match its locked hash") as raised:
        fetch(pin("torch", "0" * 64, "2.8.0"), vendors=(vendor("2.8.0+rocm6.4", "0" * 64),))
    assert torch in raised.value.details["found"]


def test_vendors_wheel_wins_over_the_registrys(index, fetch):
    wheel(index, "torch", "2.13.0", body="for CUDA")
    digest = wheel(index, "torch", "2.13.0+cpu")
    vendors = (vendor("2.13.0+cpu", digest),)
    assert fetch(pin("torch", digest, "2.13.0"), vendors=vendors) == ["wheels/torch-2.13.0+cpu-py3-none-any.whl"]


def test_users_own_folder(index, fetch, tmp_path):
    own = tmp_path / "my wheels"
    wheel(own, "torch", "2.8.0", body="for CUDA")
    digest = wheel(own, "torch", "2.8.0+rocm6.4")
    lock = pin("torch", digest, "2.8.0+rocm6.4") + pin("tiny", wheel(index, "tiny"))
    vendors = (vendor("2.8.0+rocm6.4", digest),)
    assert fetch(lock, vendors=vendors, own=own) == [
        "wheels/tiny-1.0-py3-none-any.whl",
        "my wheels/torch-2.8.0+rocm6.4-py3-none-any.whl",
    ]

    got = wheel(own, "torch", "2.8.0+rocm6.4", body="tampered")
    with pytest.raises(ConfigError, match="a wheel does not match its locked hash") as raised:
        fetch(lock, vendors=vendors, own=own)
    assert raised.value.details == {
        "where": str(own / "torch-2.8.0+rocm6.4-py3-none-any.whl"),
        "wanted": f"sha256 {'1' * 64}\nsha256 {digest}",
        "found": f"sha256 {got}",
        "fix": "fetch the file again from its publisher, or remove it from the folder",
    }


def test_users_folder_that_is_not_there(fetch, tmp_path):
    with pytest.raises(ConfigError, match="the folder of wheels does not exist"):
        fetch("", own=tmp_path / "nowhere")


@pytest.mark.seconds
def test_own_wheel_follows_the_sources(tmp_path, monkeypatch):
    checkout = tmp_path / "my work"
    (checkout / "src" / "dray").mkdir(parents=True)
    (checkout / "containers").mkdir()
    (checkout / "containers" / "venv.lock").touch()
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
        "        wheel.writestr('epoch', os.environ['SOURCE_DATE_EPOCH'])\n"
        "        wheel.writestr('dray-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: dray\\nVersion: 1\\n')\n"
        "        wheel.writestr('dray-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nTag: py3-none-any\\n')\n"
        "        wheel.writestr('dray-1.dist-info/RECORD', '')\n"
        "    return name\n"
    )
    folder = tmp_path / "wheels"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")

    made = wheels.own(checkout=checkout, folder=folder)
    first = made.stat().st_mtime_ns
    assert zipfile.ZipFile(made).read("epoch") == b"315532800"
    assert wheels.own(checkout=checkout, folder=folder).stat().st_mtime_ns == first

    module.write_text("changed = True\n")
    os.utime(module, (made.stat().st_mtime - 100,) * 2)  # an older commit, unpacked with its times
    again = wheels.own(checkout=checkout, folder=folder)
    assert list(folder.rglob("*.whl")) == [again]
    assert zipfile.ZipFile(again).read("dray/__init__.py") == b"changed = True\n"
    module.with_name("rules.toml").write_text("")  # which no module is, and the wheel has all the same
    assert wheels.own(checkout=checkout, folder=folder) != again
