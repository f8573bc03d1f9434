"""What is installed is what a lock names: pip itself, what builds dray, Debian's packages, and what is in a bundle."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dray.config.image import Image
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images.sources import arrival, debs, inputs, lock, pip, venv, wheels

pytestmark = pytest.mark.hostile("what is installed")

INSTALLS = re.compile(r"pip (?:install|download)|\$\(PIP\)|pip::install|pip\", \"(?:install|wheel)")


class TestEveryInstall:
    def test_names_hashes_or_files_of_its_own(self, root: Path) -> None:
        files = [root / "Makefile", root / ".ci" / "run", root / ".ci" / "release", *root.glob("containers/steps/*.sh")]
        lines = [line for file in files for line in file.read_text().replace("\\\n", " ").splitlines()]
        installs = [line.strip() for line in lines if INSTALLS.search(line) and not line.lstrip().startswith("#")]
        # What was made here, or checked before: the two definitions at the end are what the others are called with.
        local = ("--no-index", "/dray/*.whl", '"$wheels" deepspeed', '--no-deps "$1"', "PIP := ", "pip::install() {")
        known = ("--require-hashes", "$(LOCKED)", "--build-constraint", *local)
        assert len(installs) >= 10
        assert [line for line in installs if not any(word in line for word in known)] == []
        # A source's own code would run, though its hash is right.
        downloads = [line for line in installs if "pip download" in line]
        assert len(downloads) == 2
        assert [line for line in downloads if "--only-binary" not in line] == []

    def test_the_lock_of_venv_is_fresh_and_whole(self, root: Path) -> None:
        venv.require_fresh(root)
        pins = {pin.name: pin for pin in lock.read(venv.path(root))}
        assert {"pip", "hatchling", "editables", "pytest", "torch", "uv", "pydantic"} <= pins.keys()
        assert all(pin.hashes for pin in pins.values())
        cpu = {pin.name: pin for pin in lock.read(root / "containers" / "cpu" / "requirements.lock")}
        assert {name: pins[name].version for name in pins.keys() & cpu.keys()} == {
            name: cpu[name].version for name in pins.keys() & cpu.keys()
        }
        assert set(cpu["torch"].hashes) < set(pins["torch"].hashes)

    def test_a_lock_that_was_changed_is_told(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "containers" / "cpu").mkdir(parents=True)
        for name in ("pyproject.toml", "containers/venv.lock", "containers/cpu/requirements.lock"):
            shutil.copy(root / name, tmp_path / name)
        venv.require_fresh(tmp_path)
        with (tmp_path / "containers" / "venv.lock").open("a") as file:
            file.write(f"more==1 --hash=sha256:{'0' * 64}\n")
        with pytest.raises(ConfigError, match="the lock was changed after `dray image lock` wrote it") as refused:
            venv.require_fresh(tmp_path)
        assert refused.value.details["fix"] == "dray image lock venv"
        shutil.copy(root / "containers" / "venv.lock", tmp_path / "containers")
        project = (root / "pyproject.toml").read_text()
        (tmp_path / "pyproject.toml").write_text(project.replace('"codespell==', '"codespell>='))
        with pytest.raises(ConfigError) as refused:
            venv.require_fresh(tmp_path)
        assert refused.value.details["found"] == "changed since then: pyproject.toml"

    @pytest.mark.seconds
    @pytest.mark.parametrize("good", [True, False])
    def test_what_builds_drays_wheel_has_its_hash(self, tmp_path: Path, monkeypatch, *, good: bool) -> None:
        helper = tmp_path / "files" / "helper-1-py3-none-any.whl"
        helper.parent.mkdir()
        with zipfile.ZipFile(helper, "w") as wheel:
            wheel.writestr("helper-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: helper\nVersion: 1\n")
            wheel.writestr("helper-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n")
            wheel.writestr("helper-1.dist-info/RECORD", "")
            wheel.writestr(
                "helper.py",
                "import os, zipfile\n"
                "def build_wheel(folder, *_):\n"
                "    with zipfile.ZipFile(os.path.join(folder, 'dray-1-py3-none-any.whl'), 'w') as wheel:\n"
                "        about = 'Metadata-Version: 2.1\\nName: dray\\nVersion: 1\\n'\n"
                "        wheel.writestr('dray-1.dist-info/METADATA', about)\n"
                "        wheel.writestr('dray-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nTag: py3-none-any\\n')\n"
                "        wheel.writestr('dray-1.dist-info/RECORD', '')\n"
                "    return 'dray-1-py3-none-any.whl'\n",
            )
        digest = hashlib.sha256(helper.read_bytes()).hexdigest() if good else "0" * 64
        (tmp_path / "containers").mkdir()
        venv.path(tmp_path).write_text(f"helper==1 --hash=sha256:{digest}\n")
        (tmp_path / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["helper==1"]\nbuild-backend = "helper"\n'
            '[project]\nname = "dray"\nversion = "1"\n'
        )
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(helper.parent))
        if good:
            assert wheels.own(checkout=tmp_path, folder=tmp_path / "made").name == "dray-1-py3-none-any.whl"
        else:
            with pytest.raises(DrayError, match="pip") as refused:
                wheels.own(checkout=tmp_path, folder=tmp_path / "made")
            assert "DO NOT MATCH THE HASHES" in str(refused.value)

    def test_an_old_pip_is_told(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(pip.importlib.metadata, "version", lambda _: "23.0.1")
        with pytest.raises(UnfitError) as refused:
            pip.hashed(tmp_path)
        assert refused.value.details["found"] == "pip 23.0.1"


class TestDebian:
    @pytest.mark.parametrize("as_locked", [True, False])
    def test_packages_that_are_not_as_locked(self, root: Path, tmp_path: Path, monkeypatch, *, as_locked: bool) -> None:
        containers = tmp_path / "containers"
        containers.mkdir()
        for name in ("debian.in", "debian.sh", "debs.sh"):
            shutil.copy(root / "containers" / name, containers)
        debs.lock_file(tmp_path).write_text(f"gcc 4:12 amd64 {'0' * 64}\n")

        def download(_checkout: Path, folder: Path, **_: object) -> None:
            folder.mkdir(parents=True)
            (folder / "gcc_4%3a13_amd64.deb").write_text("newer")
            (folder / debs.INSTALLED).touch()

        monkeypatch.setattr(debs, "_download", download)
        said: list[str] = []
        fetch = {"base": tmp_path, "identity": "x", "as_locked": as_locked, "say": said.append}
        if not as_locked:
            debs.fetch(tmp_path, **fetch)
            assert said == ["dray: not as locked: gcc 4:12 -> 4:13"]
            return
        with pytest.raises(ConfigError) as refused:
            debs.fetch(tmp_path, **fetch)
        assert str(refused.value) == (
            "Debian's packages are not as locked\n"
            f"  where:  {debs.lock_file(tmp_path)}\n"
            "  found:  gcc 4:12 -> 4:13\n"
            "  fix:    --debian current (make: DEBIAN=current) takes today's packages\n"
            "          or make another base: containers/base/make-base.sh bookworm build/base/bookworm.tar\n"
            "          or lock again: dray image lock debian"
        )

    @pytest.mark.parametrize("left", ["a link", "another file"])
    def test_a_base_that_leaves_more_than_packages(self, tmp_path: Path, left: str) -> None:
        """A link of its making could put a file of this machine into a bundle."""
        for name in ("gcc_1_amd64.deb", debs.INSTALLED, "base.sha256"):
            (tmp_path / name).touch()
        debs._require_packages(tmp_path)
        if left == "a link":
            (tmp_path / "x_1_all.deb").symlink_to("/etc/passwd")
        else:
            (tmp_path / "notes").touch()
        with pytest.raises(ConfigError, match="a program of the base left a file that is not a package"):
            debs._require_packages(tmp_path)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of one wheel, which one lock of `containers` names, in a folder with a space."""
    folder, locks = tmp_path / "a bundle", tmp_path / "containers" / "cpu"
    for name, text in {"wheels/x-1-py3-none-any.whl": "x", "image.env": "A=1\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "src" / "dray").mkdir(parents=True)
    (tmp_path / "src" / "dray" / "a.py").write_text("a = 1\n")
    (folder / "dray").mkdir()
    wheel_of(folder, {"dray/a.py": "a = 1\n", "dray-1.dist-info/entry_points.txt": "[x]\ny = dray.a:a\n"})
    locks.mkdir(parents=True)
    (locks / "requirements.lock").write_text(f"x==1 --hash=sha256:{hashlib.sha256(b'x').hexdigest()}\n")
    summed(folder)
    return folder


def wheel_of(folder: Path, content: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / "dray" / "dray-1-py3-none-any.whl", "w") as wheel:
        for name, text in content.items():
            wheel.writestr(name, text)


def summed(folder: Path) -> None:
    found = arrival.sums(folder)
    lines = [f"{digest}  {name}\n" for name, digest in found.items() if name not in (arrival.SUMS, arrival.SIGNATURE)]
    (folder / arrival.SUMS).write_text("".join(lines))


def key(folder: Path, name: str) -> tuple[Path, Path]:
    """A key, and a file of signers with it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name], check=True)
    signers = folder / f"{name}.signers"
    signers.write_text(f"{name} {(folder / name).with_suffix('.pub').read_text()}")
    return folder / name, signers


class TestBundle:
    def test_a_whole_one_passes(self, bundle: Path) -> None:
        arrival.require(bundle, bundle.parent / "containers")

    @pytest.mark.parametrize(
        ("change", "problem", "found"),
        [
            ("rm SHA256SUMS", "not a bundle", None),
            ("rm image.env", "the bundle differs from its checksums", "image.env: missing"),
            ("echo B=1 >>image.env", "the bundle differs from its checksums", "image.env: changed"),
            ("echo more >wheels/y.whl", "the bundle differs from its checksums", "wheels/y.whl: not in it"),
            ("printf '\\377' >SHA256SUMS", "the bundle differs from its checksums", None),
            (": >SHA256SUMS", "the bundle differs from its checksums", None),
        ],
    )
    def test_what_has_not_arrived_is_told(self, bundle: Path, change: str, problem: str, found: str | None) -> None:
        subprocess.run(["bash", "-c", change], cwd=bundle, check=True)
        with pytest.raises(ConfigError) as refused:
            arrival.require(bundle, bundle.parent / "containers")
        assert refused.value.problem == problem
        assert found is None or refused.value.details["found"] == found

    def test_a_wheel_that_no_lock_names_is_refused_whatever_the_sums_say(self, bundle: Path) -> None:
        (bundle / "wheels" / "x-1-py3-none-any.whl").write_text("evil")
        summed(bundle)
        with pytest.raises(ConfigError, match="wheels or sources that no lock of this checkout names") as refused:
            arrival.require(bundle, bundle.parent / "containers")
        assert refused.value.details["found"] == "wheels/x-1-py3-none-any.whl"

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("dray/a.py", "evil = 1\n"),
            ("dray/b.py", "evil = 1\n"),
            ("evil.pth", "import evil\n"),
            ("dray/../evil.py", "evil = 1\n"),
            ("dray-1.data/scripts/python", "evil"),
            ("dray-1.dist-info/entry_points.txt", "[x]\ny = os:system\n"),
        ],
    )
    def test_its_dray_is_this_checkout_s(self, bundle: Path, name: str, text: str) -> None:
        """No lock names that wheel, and make installs it."""
        wheel_of(bundle, {"dray/__init__.py": "", name: text} if name == "dray/b.py" else {name: text})
        summed(bundle)
        with pytest.raises(ConfigError, match="the bundle's dray is not this checkout's") as refused:
            arrival.require(bundle, bundle.parent / "containers")
        assert f"dray-1-py3-none-any.whl: {name}" in refused.value.details["found"]

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            ("mkfifo wheels/p", "wheels/p: a pipe"),
            ("ln -s nothing wheels/d", "wheels/d: a link to nothing"),
            ("ln -s /tmp steps", "steps: a link to /tmp"),
            ("rm image.env; ln -s ../x image.env", "image.env: a link to ../x"),
        ],
    )
    def test_it_has_files_and_folders_alone(self, bundle: Path, change: str, found: str) -> None:
        subprocess.run(["bash", "-c", change], cwd=bundle, check=True)
        with pytest.raises(ConfigError, match="the bundle has links or special files") as refused:
            arrival.require(bundle, bundle.parent / "containers")
        assert refused.value.details["found"] == found

    def test_who_signed_it(self, bundle: Path, tmp_path: Path, capsys) -> None:
        locks = tmp_path / "containers"
        (mine, me), (_, stranger) = key(tmp_path, "me"), key(tmp_path, "stranger")
        with pytest.raises(ConfigError, match="the bundle is not signed"):
            arrival.require(bundle, locks, me)
        arrival.sign(bundle, mine)
        arrival.require(bundle, locks)
        arrival.require(bundle, locks, me)
        assert capsys.readouterr().err == "dray: the bundle is signed by me\n"
        with pytest.raises(ConfigError, match="signed with another key"):
            arrival.require(bundle, locks, stranger)
        with pytest.raises(ConfigError, match="the file of signers does not exist"):
            arrival.require(bundle, locks, tmp_path / "nobody")
        (bundle / "image.env").write_text("B=1\n")
        summed(bundle)
        with pytest.raises(ConfigError, match="the bundle's checksums were changed after they were signed"):
            arrival.require(bundle, locks, me)

    def test_a_key_that_is_none(self, bundle: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="the bundle cannot be signed"):
            arrival.sign(bundle, tmp_path / "no key")

    def test_make_asks_before_it_installs(self, bundle: Path, root: Path, tmp_path: Path) -> None:
        """With the plain Python of a machine that has nothing."""
        (bundle / "image.env").unlink()
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / "src" / "dray", tmp_path / "src" / "dray", ignore=ignored, dirs_exist_ok=True)
        for name in ("Makefile", "pyproject.toml", "containers/venv.lock"):
            shutil.copy(root / name, tmp_path / name)
        argv = ["make", "install", f"BUNDLE={bundle.name}", f"PYTHON={shlex.quote(sys.executable)} -S"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("dray: the bundle differs from its checksums\n"), done.stderr
        assert not (tmp_path / ".venv").exists()

    @pytest.mark.parametrize("torch", ["", " with torch"])
    def test_make_tells_what_is_installed_where(self, root: Path, tmp_path: Path, torch: str) -> None:
        """Also where there is nothing to do, as after `make demo`."""
        folder = tmp_path / "my dray"
        (folder / "containers").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "containers/venv.lock"):
            shutil.copy(root / name, folder / name)
        (folder / ".venv" / "bin").mkdir(parents=True)
        for name in ("host", *(["installed"] if torch else [])):
            (folder / ".venv" / name).touch()
        program = folder / ".venv" / "bin" / "dray"
        program.write_text("#!/bin/sh\necho dray 1.2.3\n")
        program.chmod(0o755)
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # as of `make test`
        done = subprocess.run(["make", "install"], cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == (f"dray 1.2.3 is installed{torch}: {program}\n", "")

    def test_its_signature_is_no_input_of_the_image(self, bundle: Path, tmp_path: Path) -> None:
        described = Image.model_validate({"variant": "cpu", "base": f"x@sha256:{'0' * 64}", "python": "3.11"})
        before = inputs.Source(image=described, inputs=bundle, base=bundle).digest
        arrival.sign(bundle, key(tmp_path, "me")[0])
        assert inputs.Source(image=described, inputs=bundle, base=bundle).digest == before
