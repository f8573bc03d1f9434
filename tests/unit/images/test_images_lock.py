"""Locks: the real uv on an index made here, without a network."""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dray.config.image_definition import Image, Vendor
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images.locks import lock, uv

CPU = {"version": "2.0+cpu", "sha256": ["c" * 64]}
ROCM = {"version": "2.0+rocm6", "sha256": ["a" * 64]}


def today() -> str:
    """Asked in each test: the whole of them may run over midnight."""
    return datetime.now(UTC).date().isoformat()


class Checkout:
    """A checkout with one variant, and the index that its requirements come from."""

    def __init__(self, root: Path) -> None:
        self.root = root / "my work"
        self.index = root / "index"
        (self.root / "containers").mkdir(parents=True)
        self.write("pyproject.toml", '[project]\nname = "dray"\nversion = "1"\ndependencies = ["rich>=1"]\n')
        self.write("containers/common.in", "tokens # for all\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def publish(self, name: str, version: str, *needs: str) -> None:
        page, about = self.index / name, f"{name.replace('-', '_')}-{version}.dist-info"
        page.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(page / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as made:
            requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
            made.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
            made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            made.writestr(f"{about}/RECORD", "")
        self.list(page)

    def list(self, page: Path) -> None:
        links = (f'<a href="{path.name}">{path.name}</a>' for path in sorted(page.glob("*-*")))
        (page / "index.html").write_text("\n".join(links))

    def image(self, variant: str = "cpu", **vendors: dict[str, object]) -> Image:
        index = "https://download.pytorch.org/whl/cpu"
        made = [Vendor(name=name.replace("_", "-"), index=index, **told) for name, told in vendors.items()]
        return Image(variant=variant, base=f"debian@sha256:{'0' * 64}", python="3.11", vendor=made)

    def lock(self, name: str = "cpu/requirements.lock") -> Path:
        return self.root / "containers" / name

    def pinned(self, name: str = "cpu/requirements.lock") -> list[str]:
        return [f"{pin.name}=={pin.version}" for pin in lock.read(self.lock(name))]

    def block(self, name: str, version: str) -> str:
        """As a lock has it."""
        (path,) = (self.index / name).glob(f"*-{version}-*.whl")
        return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Checkout:
    made = Checkout(tmp_path)
    monkeypatch.setenv("UV_DEFAULT_INDEX", made.index.as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    made.publish("tokens", "9.0")
    (made.index / "tokens").rename(tmp_path / "a folder of wheels")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "a folder of wheels"))
    made.publish("tokens", "1.0")
    made.publish("rich", "15.0")
    made.publish("triton", "3.0")
    made.publish("nvidia-blas", "13.0")
    made.publish("cuda-toolkit", "13.0", "nvidia-blas")
    made.publish("torch", "2.0", "cuda-toolkit", "triton")
    return made


def test_vendors_torch_in_the_registrys_place(checkout):
    checkout.write("containers/cpu/requirements.in", "-r ../common.in\n# comment\ntorch==2.0\ntriton>=3\n")
    image = checkout.image(torch=CPU)
    assert uv.update(checkout.root, image) == [
        "rich none -> 15.0",
        "tokens none -> 1.0",
        "torch none -> 2.0",
        "triton none -> 3.0",
    ]
    first, second, third, rest = checkout.lock().read_text().split("\n", 3)
    assert first == f"# dray image lock cpu, {today()}"
    names = [origin.split(" ")[0] for origin in second.removeprefix("# from ").split(", ")]
    assert names == ["requirements.in", "../common.in", "../../pyproject.toml", "image.toml"]
    assert third == f"# lines {hashlib.sha256(rest.encode()).hexdigest()[:16]}"
    assert rest == (
        checkout.block("rich", "15.0")
        + checkout.block("tokens", "1.0")
        + f"torch==2.0 \\\n    --hash=sha256:{'c' * 64}\n"
        + checkout.block("triton", "3.0")
    )
    assert lock.epoch(checkout.lock()) == int(datetime.fromisoformat(f"{today()}T00:00:00+00:00").timestamp())


def test_vendors_own_version_and_package(checkout):
    checkout.write("containers/rocm/requirements.in", "torch==2.0\n")
    image = checkout.image("rocm", torch=ROCM, pytorch_triton_rocm={"version": "3.4.0", "sha256": ["b" * 64]})
    uv.update(checkout.root, image)
    assert checkout.pinned("rocm/requirements.lock") == ["pytorch-triton-rocm==3.4.0", "rich==15.0", "torch==2.0+rocm6"]
    made = checkout.lock("rocm/requirements.lock").read_bytes()
    assert uv.update(checkout.root, image) == []
    assert checkout.lock("rocm/requirements.lock").read_bytes() == made


@pytest.mark.seconds
def test_pins_and_date_stay_until_upgraded(checkout):
    checkout.write("containers/cpu/requirements.in", "-r ../common.in\n")
    image = checkout.image()
    uv.update(checkout.root, image)
    checkout.lock().write_text(checkout.lock().read_text().replace(today(), "2026-01-02"))
    checkout.publish("tokens", "1.1")
    before = checkout.lock().read_bytes()

    assert uv.update(checkout.root, image) == []
    assert checkout.lock().read_bytes() == before
    assert lock.epoch(checkout.lock()) == 1767312000

    assert uv.update(checkout.root, image, upgrade=True) == ["tokens 1.0 -> 1.1"]
    assert checkout.pinned() == ["rich==15.0", "tokens==1.1"]
    assert checkout.lock().read_text().startswith(f"# dray image lock cpu, {today()}\n")


@pytest.mark.seconds
def test_build_tools_keep_to_what_stays(checkout):
    checkout.write("containers/cuda/requirements.in", "torch==2.0\n")
    checkout.write("containers/cuda/build.in", "-c requirements.lock\nnvcc\n")
    checkout.publish("nvcc", "13.0", "nvidia-blas")
    uv.update(checkout.root, checkout.image("cuda"))
    stays = ["cuda-toolkit==13.0", "nvidia-blas==13.0", "rich==15.0", "torch==2.0", "triton==3.0"]
    assert checkout.pinned("cuda/requirements.lock") == stays

    checkout.publish("nvidia-blas", "13.1")
    checkout.lock("cuda/build.lock").unlink()
    assert uv.update(checkout.root, checkout.image("cuda")) == ["nvcc none -> 13.0", "nvidia-blas none -> 13.0"]
    lock.require_fresh(checkout.root, checkout.image("cuda"))

    checkout.publish("rich", "15.1")
    build = checkout.lock("cuda/build.lock").read_bytes()
    uv.update(checkout.root, checkout.image("cuda"), upgrade=True)
    checkout.lock("cuda/build.lock").write_bytes(build)
    with pytest.raises(ConfigError) as raised:
        lock.require_fresh(checkout.root, checkout.image("cuda"))
    assert raised.value.details["found"] == "changed since then: requirements.lock"


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("containers/cpu/requirements.in", "-r ../common.in\ntorch==2.1\n", "requirements.in"),
        ("containers/common.in", "tokens==1.0\n", "../common.in"),
        ("containers/cpu/requirements.in", "torch==2.0\n", "requirements.in, ../common.in"),
        ("pyproject.toml", "[project]\ndependencies = []\n", "../../pyproject.toml"),
        ("containers/common.in", "# the same again\n\ntokens  # for all of them\n", None),
        ("pyproject.toml", '[project]\ndependencies = ["rich>=1"]\n[other]\n', None),
    ],
)
def test_stale(checkout, name, text, changed):
    checkout.write("containers/cpu/requirements.in", "-r ../common.in\ntorch==2.0\n")
    image = checkout.image(torch=CPU)
    uv.update(checkout.root, image)
    lock.require_fresh(checkout.root, image)

    checkout.write(name, text)
    if changed is None:
        lock.require_fresh(checkout.root, image)
        return
    with pytest.raises(ConfigError) as raised:
        lock.require_fresh(checkout.root, image)
    assert raised.value.details == {
        "where": str(checkout.lock()),
        "found": f"changed since then: {changed}",
        "fix": "dray image lock cpu",
    }


def test_stale_by_image_or_without_a_head(checkout):
    checkout.write("containers/cpu/requirements.in", "torch==2.0\n")
    image = checkout.image(torch=CPU)
    for text, found in (
        (None, "no such file"),
        ("torch==2.0\n", "its first lines, with the date and the origins, are missing"),
    ):
        if text:
            checkout.lock().write_text(text)
        with pytest.raises(ConfigError) as raised:
            lock.require_fresh(checkout.root, image)
        assert raised.value.details["found"].startswith(found)
    uv.update(checkout.root, image)
    with pytest.raises(ConfigError) as raised:
        lock.require_fresh(checkout.root, checkout.image(torch={**CPU, "sha256": ["d" * 64]}))
    assert raised.value.details["found"] == "changed since then: image.toml"


# What is changed, and what locking again then says: versions stay where there are such, hashes are asked for anew.
EDITS = {
    "hash": (r"(tokens==1.0 \\\n    --hash=sha256:)\w{4}", r"\1ffff", ["tokens 1.0 -> 1.0"]),
    "version": ("tokens==1.0", "tokens==7.0", ["tokens 7.0 -> 1.1"]),
    "a package less": (r"tokens.*\n.*\n", "", ["tokens none -> 1.1"]),
    "a comment more": ("tokens==", "# by hand\ntokens==", []),
    "two versions of the lock in one": (
        "(tokens)",
        r"<<<<<<< HEAD\n=======\n\1",
        [" ===== -> none", "<<<<<<<  -> none"],
    ),
}


@pytest.mark.seconds
@pytest.mark.parametrize("edit", EDITS)
def test_lines_changed_by_hand(checkout, edit):
    checkout.write("containers/cpu/requirements.in", "-r ../common.in\n")
    image = checkout.image()
    uv.update(checkout.root, image)
    checkout.publish("tokens", "1.1")
    written = checkout.lock().read_text()
    pattern, new, changes = EDITS[edit]
    checkout.lock().write_text(re.sub(pattern, new, written))
    assert checkout.lock().read_text() != written
    with pytest.raises(ConfigError) as raised:
        lock.require_fresh(checkout.root, image)
    assert str(raised.value) == (
        "the lock was changed after `dray image lock` wrote it\n"
        f"  where:  {checkout.lock()}\n  fix:    dray image lock cpu"
    )
    assert uv.update(checkout.root, image) == changes
    lock.require_fresh(checkout.root, image)
    version = "1.1" if "1.1" in "".join(changes) else "1.0"
    assert checkout.lock().read_text().split("\n", 3)[3] == (
        checkout.block("rich", "15.0") + checkout.block("tokens", version)
    )


@pytest.mark.seconds
def test_what_cannot_be_locked_leaves_the_old_lock(checkout, monkeypatch):
    checkout.write("containers/cpu/requirements.in", "tokens\n")
    uv.update(checkout.root, checkout.image())
    before = checkout.lock().read_bytes()

    page = checkout.index / "sources"
    page.mkdir()
    (page / "sources-1.0.tar.gz").touch()
    checkout.list(page)
    checkout.write("containers/cpu/requirements.in", "tokens\nsources\n")
    with pytest.raises(ConfigError, match="no set of packages fits") as raised:
        uv.update(checkout.root, checkout.image())
    assert "sources==1.0 has no usable wheels" in raised.value.details["found"]
    assert raised.value.details["where"] == "containers/cpu/requirements.in"

    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    with pytest.raises(DrayError, match="uv cannot reach the package index") as failed:
        uv.update(checkout.root, checkout.image())
    assert failed.value.exit_code == 1
    assert checkout.lock().read_bytes() == before


def test_without_uv(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UnfitError) as raised:
        uv.update(checkout.root, checkout.image())
    assert raised.value.details == {
        "where": str(tmp_path / "python"),
        "fix": f"{tmp_path / 'python'} -m pip install --require-hashes --constraint containers/venv.lock uv",
    }


class TestTargets:
    """One lock serves both machines and both Pythons, or says which it does not."""

    @pytest.fixture
    def locked(self, checkout, monkeypatch) -> Checkout:
        checkout.write("containers/cuda/requirements.in", "torch==2.0\nfast\n")
        checkout.publish("fast", "1.0")
        return checkout

    def asked(self, checkout: Checkout, **vendors: dict[str, object]) -> list[str]:
        image = checkout.image("cuda", **vendors)
        uv.update(checkout.root, image)
        return list(uv.coverage(checkout.root, image))

    def refused(self, checkout: Checkout) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            self.asked(checkout)
        return str(refused.value).splitlines()

    @pytest.mark.seconds
    def test_every_wheel_is_there(self, locked):
        locked.write("containers/cuda/build.in", "tokens\n")
        assert self.asked(locked) == [
            "every wheel for x86_64, Python 3.11",
            "every wheel for x86_64, Python 3.12",
            "every wheel for aarch64, Python 3.11",
            "every wheel for aarch64, Python 3.12",
        ]

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        ("tag", "unserved"),
        [
            ("cp311-cp311-manylinux_2_28_x86_64", "x86_64 with Python 3.12"),
            ("cp311-abi3-manylinux_2_28_x86_64", "aarch64 with Python 3.11"),
        ],
    )
    def test_a_wheel_that_serves_one(self, locked, tag, unserved):
        (wheel,) = (locked.index / "fast").glob("*.whl")
        wheel.rename(wheel.with_name(f"fast-1.0-{tag}.whl"))
        locked.list(wheel.parent)
        said = self.refused(locked)
        assert said[0] == f"the lock lacks wheels for {unserved}"
        assert said[1] == f"  where:  {locked.lock('cuda/requirements.lock')}"
        assert said[-1] == "  fix:    dray image lock cuda; or change the requirement that has no such wheel"

    def test_a_package_that_one_machine_needs_more(self, locked):
        locked.publish("fast", "2.0", 'tokens; platform_machine == "aarch64"')
        locked.write("containers/cuda/requirements.in", "fast\n")
        assert self.refused(locked)[0] == "the lock lacks wheels for aarch64 with Python 3.11"

    def test_a_file_that_the_index_has_changed(self, locked):
        self.asked(locked)
        with (locked.index / "fast/fast-1.0-py3-none-any.whl").open("ab") as wheel:
            wheel.write(b"another")
        with pytest.raises(ConfigError) as refused:
            list(uv.coverage(locked.root, locked.image("cuda")))
        assert str(refused.value).splitlines()[0] == "the lock lacks wheels for x86_64 with Python 3.11"

    def test_what_comes_from_a_vendor_is_left_out(self, locked):
        assert self.asked(locked, torch=ROCM)[0] == "every wheel for x86_64, Python 3.11"

    def test_hosts_have_their_own_pythons(self, locked):
        lines = [
            f"torch==2.0 {locked.block('torch', '2.0').partition(' ')[2]}",
            f"rich==15.0 ; sys_platform == 'linux' {locked.block('rich', '15.0').partition(' ')[2]}",
        ]
        locked.write("containers/venv.lock", "".join(lines))
        pythons = ("3.11", "3.12", "3.13", "3.14")
        assert list(uv.coverage(locked.root, None)) == [
            f"every wheel for {machine}, Python {python}" for machine in ("x86_64", "aarch64") for python in pythons
        ]
        locked.write("containers/venv.lock", "".join(lines).replace("sha256:", "sha256:0"))
        with pytest.raises(ConfigError, match=r"the lock lacks wheels for x86_64 with Python 3\.11"):
            list(uv.coverage(locked.root, None))
