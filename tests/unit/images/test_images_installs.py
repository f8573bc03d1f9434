"""What is installed is what a lock names: pip itself, and what builds dray."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from dray.contract.findings import ConfigError, DrayError
from dray.images.fetch import wheels
from dray.images.locks import lock

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
        lock.require_fresh(root, None)
        pins = {pin.name: pin for pin in lock.read(lock.venv(root))}
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
        lock.require_fresh(tmp_path, None)
        with (tmp_path / "containers" / "venv.lock").open("a") as file:
            file.write(f"more==1 --hash=sha256:{'0' * 64}\n")
        with pytest.raises(ConfigError, match="the lock was changed after `dray image lock` wrote it") as refused:
            lock.require_fresh(tmp_path, None)
        assert refused.value.details["fix"] == "dray image lock venv"
        shutil.copy(root / "containers" / "venv.lock", tmp_path / "containers")
        project = (root / "pyproject.toml").read_text()
        (tmp_path / "pyproject.toml").write_text(project.replace('"codespell==', '"codespell>='))
        with pytest.raises(ConfigError) as refused:
            lock.require_fresh(tmp_path, None)
        assert refused.value.details["found"] == "changed since then: pyproject.toml"

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
        lock.venv(tmp_path).write_text(f"helper==1 --hash=sha256:{digest}\n")
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
