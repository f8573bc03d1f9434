"""What a build needs of a machine: each check fails once, with the fix that a user reads, and writes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command import dray
from dray.contract.findings import Finding
from dray.fitness import build as builds
from dray.fitness.build import Build
from dray.images import inputs
from helpers import ROOT

GB = 10**9
VARIANTS = builds.variants(ROOT)
MKSQUASHFS = "echo '-all-time -mkfs-time -root-mode -no-xattrs zstd'"
Make = Callable[..., Build]


@pytest.fixture
def build(tmp_path: Path) -> Make:
    """A checkout with nothing fetched."""
    folder = tmp_path / "work"
    shutil.copytree(ROOT / "containers", folder / "containers", symlinks=True)
    (folder / "src").mkdir()

    def make(variant: str = "cpu", **changes: Any) -> Build:
        return Build(checkout=folder, variant=variant, **changes)

    return make


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user's Linux on x86_64, with room and namespaces, without Apptainer and Docker."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(builds.platform, "system", lambda: "Linux")
    monkeypatch.setattr(builds.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(builds, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(builds, "_APPARMOR", tmp_path / "apparmor")
    space(monkeypatch, lambda _: 999 * GB)
    program(tmp_path, "stat", "echo ext2/ext3")
    program(tmp_path, "unshare", "")


def space(monkeypatch: pytest.MonkeyPatch, free: Callable[[Path], float]) -> None:
    monkeypatch.setattr(builds.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free(folder)))


def program(folder: Path, name: str, script: str) -> None:
    """A stand-in for a program of the machine."""
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / name).chmod(0o755)


def switch(folder: Path, name: str, value: str) -> None:
    """A switch of the kernel's."""
    (folder / "proc" / name).parent.mkdir(parents=True)
    (folder / "proc" / name).write_text(f"{value}\n")


def errors(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.code]


class TestBuilder:
    """Apptainer of this machine, or Docker."""

    def test_neither(self, build: Make) -> None:
        (error,) = errors(builds.check(build()))
        assert str(error) == (
            "this machine has no Apptainer, and no Docker Engine to run it in\n"
            "  found:  no Docker Engine runs on this machine\n"
            "  fix:    install apptainer and squashfs-tools\n"
            "          or install Docker Engine and start it, or set DOCKER_HOST"
        )

    def test_the_host_s_own_apptainer(self, build: Make, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", "")
        program(tmp_path, "mksquashfs", MKSQUASHFS)
        findings = builds.check(build())
        assert [finding.problem for finding in findings] == ["processor", "image cpu", "builder", "user namespaces"]
        assert not errors(findings)
        (refused,) = errors(builds.check(build(formats=["docker"])))
        assert refused.problem == "docker is not on this machine"
        program(tmp_path, "docker", "")
        (refused,) = errors(builds.check(build(formats=["docker"])))
        assert refused.fix == "install Docker Engine and start it, or set DOCKER_HOST"
        (refused,) = errors(builds.check(build(formats=["podman"])))
        assert refused.problem == "podman is not on this machine"

    @pytest.mark.parametrize(
        ("script", "found"),
        [
            ("echo '-all-time -mkfs-time -root-mode -no-xattrs gzip'", "a version without zstd"),
            ("echo '-no-xattrs zstd' >&2; exit 1", "a version without -root-mode -all-time -mkfs-time"),
        ],
    )
    def test_an_old_mksquashfs(self, script: str, found: str, build: Make, tmp_path: Path) -> None:
        """EL8 has 4.3."""
        program(tmp_path, "apptainer", "")
        program(tmp_path, "mksquashfs", script)
        (error,) = errors(builds.check(build()))
        assert (error.wanted, error.found) == ("squashfs-tools 4.4 or newer, with zstd", found)

    def test_no_mksquashfs(self, build: Make, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", "")
        (error,) = errors(builds.check(build()))
        assert error.problem == "mksquashfs is not installed"

    @pytest.mark.parametrize("folder", ["my images", "a,b", "a:b"])
    def test_the_host_s_own_apptainer_and_a_path(self, build: Make, tmp_path: Path, folder: str) -> None:
        program(tmp_path, "apptainer", "")
        (error,) = errors(builds.check(build(out=tmp_path / folder / "x.sif")))
        problem = "apptainer cannot use a folder whose path has a space, a comma or a colon"
        assert (error.problem, error.code) == (problem, 78)

    @pytest.mark.parametrize(
        ("name", "value", "profile", "fix"),
        [
            ("user/max_user_namespaces", "96365", "", "ask the administrators for user namespaces"),
            ("user/max_user_namespaces", "0", "", "sudo sysctl -w user.max_user_namespaces=15000"),
            ("kernel/unprivileged_userns_clone", "0", "", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
            ("kernel/apparmor_restrict_unprivileged_userns", "1", "", "install Apptainer 1.3.4 or newer"),
            ("kernel/apparmor_restrict_unprivileged_userns", "1", "apptainer", ""),
            ("kernel/apparmor_restrict_unprivileged_userns", "0", "", "ask the administrators"),
        ],
    )
    @pytest.mark.parametrize("container", [False, True])
    def test_user_namespaces(
        self, name: str, value: str, profile: str, fix: str, container: bool, build: Make, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """The trial fails: Ubuntu 24.04 has AppArmor's switch. The builder's container shares only the kernel's."""
        if container:
            self.docker(monkeypatch, {"KernelVersion": os.uname().release})
            fix = "" if fix.startswith("ask") else fix
        else:
            program(tmp_path, "apptainer", "")
            program(tmp_path, "mksquashfs", MKSQUASHFS)
        program(tmp_path, "unshare", "echo not permitted >&2; exit 1")
        switch(tmp_path, name, value)
        (tmp_path / "apparmor").mkdir()
        if profile:
            (tmp_path / "apparmor" / profile).touch()
        found = errors(builds.check(build()))
        assert [error.fix.startswith(fix) for error in found] == [True] * bool(fix)

    def docker(self, monkeypatch: pytest.MonkeyPatch, about: Mapping[str, Any]) -> None:
        @contextmanager
        def engine():
            yield SimpleNamespace(info=lambda: about)

        monkeypatch.setattr(builds.builder, "engine", engine)

    def test_docker_desktop_has_a_kernel_of_its_own(
        self, build: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.docker(monkeypatch, {"KernelVersion": "6.10.14-linuxkit", "OperatingSystem": "Docker Desktop"})
        program(tmp_path, "unshare", "exit 1")
        switch(tmp_path, "user/max_user_namespaces", "0")
        assert not errors(builds.check(build()))

    @pytest.mark.parametrize("mode", [0o4755, 0o755])
    def test_apptainer_with_setuid_needs_none(self, mode: int, build: Make, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", f"echo 'LIBEXECDIR={tmp_path}'")
        program(tmp_path, "mksquashfs", MKSQUASHFS)
        program(tmp_path, "unshare", "exit 1")
        starter = tmp_path / "apptainer/bin/starter-suid"
        starter.parent.mkdir(parents=True)
        starter.touch()
        starter.chmod(mode)
        assert len(errors(builds.check(build()))) == (mode == 0o755)


def test_the_trial_of_namespaces_is_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apptainer and `unshare` of these tests need them too."""
    monkeypatch.undo()
    assert builds._namespaces(container=False).found == "ordinary users may make them"


@pytest.mark.parametrize(
    ("variant", "system", "processor", "fits"),
    [
        ("cuda", "Linux", "x86_64", True),
        ("cuda", "Linux", "aarch64", True),
        ("cpu", "Linux", "aarch64", False),
        ("rocm", "Linux", "ppc64le", False),
        ("cuda", "Darwin", "arm64", False),
        ("cpu", "Darwin", "x86_64", False),
    ],
)
def test_the_processor(
    variant: str, system: str, processor: str, fits: bool, build: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "Darwin":
        program(tmp_path, "stat", "exit 1")  # BSD's has no --file-system
    monkeypatch.setattr(builds.platform, "system", lambda: system)
    monkeypatch.setattr(builds.platform, "machine", lambda: processor)
    found = [finding for finding in errors(builds.check(build(variant))) if "torch" in finding.problem]
    assert bool(found) is not fits
    assert all(error.found == f"{system} on {processor}" and error.code == 69 for error in found)
    assert all("dray image adopt FILE" in error.fix for error in found)


class TestRoom:
    """On one disk or two, with what is fetched already."""

    def check(self, build: Build) -> list[Finding]:
        image = inputs.image(ROOT, "cpu")
        assert image.size
        measured = image.size.model_copy(update={"wheels_mb": 500, "unpacked_mb": 1600, "sif_mb": 460})
        return list(builds._room(build, image.model_copy(update={"size": measured})))

    @pytest.mark.parametrize(
        ("changes", "needs"),
        [({}, 3.2), ({"formats": ["docker"]}, 3.8), ({"formats": ["sif", "docker"]}, 4.7), ({"bundled": True}, 2.6)],
    )
    def test_what_is_needed(
        self, changes: Mapping[str, Any], needs: float, build: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        space(monkeypatch, lambda _: (needs + 0.1) * GB)
        (ok,) = self.check(build(**changes))
        found = f"a build needs {needs} GB of disk in {tmp_path}/work, which has"
        assert (ok.level, ok.found) == ("ok", f"{found} {needs + 0.1:.1f} GB free")
        space(monkeypatch, lambda _: (needs - 0.1) * GB)
        (error,) = self.check(build(**changes))
        assert (error.code, error.found) == (69, f"{found} {needs - 0.1:.1f} GB free")
        assert error.fix == "make room; or dray image build cpu --out FOLDER/dray-cpu.sif, on another disk"

    def test_an_earlier_build_may_have_left_most_of_it(self, build: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        space(monkeypatch, lambda _: 0)
        (build().checkout / "build/wheels").mkdir(parents=True)
        (note,) = self.check(build())
        assert (note.code, note.kind) == (0, "note")

    def test_what_is_fetched_is_on_the_disk_of_the_checkout(
        self, build: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "scratch"
        out.mkdir()
        real = os.stat
        other = SimpleNamespace(st_dev=-1, st_mode=real(out).st_mode)
        monkeypatch.setattr(Path, "stat", lambda path, **options: other if path == out else real(path, **options))
        space(monkeypatch, lambda folder: (9.0 if folder == out else 0.5) * GB)
        error, ok = self.check(build(out=out / "x.sif"))
        assert (error.code, error.fix) == (69, "make room")
        assert error.found == f"a build needs 0.6 GB of disk in {tmp_path}/work, which has 0.5 GB free"
        assert (ok.level, ok.found) == ("ok", f"a build needs 2.6 GB of disk in {out}, which has 9.0 GB free")

    @pytest.mark.parametrize(("kind", "noted"), [("lustre", True), ("nfs", True), ("xfs", False), ("tmpfs", False)])
    def test_a_network_disk(self, kind: str, noted: bool, build: Make, tmp_path: Path) -> None:
        """A login node's clone is often on Lustre."""
        program(tmp_path, "stat", f"echo {kind}")
        notes = [finding for finding in self.check(build()) if finding.kind == "note"]
        assert len(notes) == noted
        assert all(f"({kind})" in note.found and "--out /tmp/dray-cpu.sif" in note.fix for note in notes)


class TestSizes:
    """What image.toml says is true of the locks, and of the cpu image."""

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_locks_that_were_summed(self, variant: str) -> None:
        image = inputs.image(ROOT, variant)
        assert image.size
        assert 1.2 * image.size.wheels_mb < image.size.unpacked_mb < 4 * image.size.wheels_mb
        assert 0.5 * image.size.wheels_mb < image.size.sif_mb < 1.2 * image.size.wheels_mb

    @pytest.mark.sif
    def test_the_cpu_image(self, sif: Path) -> None:
        about = inputs.image(ROOT, "cpu").size
        assert about
        assert about.sif_mb == pytest.approx(sif.stat().st_size / 1e6, rel=0.1)
        wheels = [path for path in (ROOT / "build/inputs/cpu/wheels").glob("*") if path.is_file()]
        if wheels:  # else the image was brought from another machine
            assert about.wheels_mb == pytest.approx(sum(path.stat().st_size for path in wheels) / 1e6, rel=0.05)


class TestCommands:
    """As users type them; nothing may be written."""

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        copy = tmp_path / "a clone"
        copy.mkdir()
        shutil.copytree(ROOT / "containers", copy / "containers", symlinks=True)
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, copy)
        return copy

    def run(self, copy: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER", "SUDO", "DRAY"))}
        path = {"PATH": "/usr/bin:/bin", "DRAY_HOME": str(copy)}
        before = sorted(copy.rglob("*"))
        ended = subprocess.run(
            words, cwd=copy, env={**kept, **path, **environment}, capture_output=True, text=True, check=False
        )
        assert sorted(copy.rglob("*")) == before
        return ended

    def test_a_context_whose_engine_is_not_started(self, copy: Path, tmp_path: Path) -> None:
        meta = tmp_path / "docker/contexts/meta" / hashlib.sha256(b"desktop-linux").hexdigest() / "meta.json"
        meta.parent.mkdir(parents=True)
        url = f"unix://{tmp_path}/.docker/desktop/docker.sock"
        about = {"Name": "desktop-linux", "Metadata": {}, "Endpoints": {"docker": {"Host": url}}}
        meta.write_text(json.dumps(about))
        (tmp_path / "docker/config.json").write_text('{"currentContext": "desktop-linux"}')
        words = (sys.executable, "-m", "dray", "image", "build", "cpu", "--format", "docker")
        ended = self.run(copy, *words, DOCKER_CONFIG=str(tmp_path / "docker"))
        assert ended.returncode == 69
        assert (
            "error   Docker Desktop is not running: [Errno 2] No such file or directory\n"
            f"        where:  {url} (context desktop-linux)\n"
            "        fix:    start Docker Desktop (on Linux: systemctl --user start docker-desktop)\n"
        ) in ended.stderr

    @pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be sudo's")
    @pytest.mark.parametrize(
        ("owner", "sudo", "refused"),
        [
            (1000, {"SUDO_UID": "1000", "SUDO_USER": "ann"}, True),
            (1000, {}, False),  # root of a container, with a user's folder bound
            (0, {"SUDO_UID": "1000"}, False),  # root's own checkout
        ],
    )
    def test_sudo_make(self, owner: int, sudo: Mapping[str, str], refused: bool, copy: Path) -> None:
        """It would leave root's .venv and build/ in the clone."""
        os.chown(copy, owner, owner)
        ended = self.run(copy, "make", "--silent", "image-cpu", PYTHON="false", **sudo)
        said = "dray: sudo would leave root's files in your checkout\n  fix:    make image-cpu; if Docker refuses you, "
        assert ended.stderr.startswith(said) is refused

    def test_an_old_python(self, copy: Path, tmp_path: Path) -> None:
        (copy / "containers/venv.lock").touch()
        program(tmp_path, "python3.9", "case $1 in --version) echo Python 3.9.2;; *) exit 1;; esac")
        ended = self.run(copy, "make", "--silent", "image-cpu", PYTHON=str(tmp_path / "bin/python3.9"))
        assert "dray needs Python 3.11 or newer; this is Python 3.9.2. Set PYTHON=python3.11\n" in ended.stderr

    @pytest.mark.seconds
    @pytest.mark.parametrize("words", [["image", "build", "gpu"], ["doctor", "--build", "gpu"]])
    def test_an_unknown_variant(self, words: list[str]) -> None:
        ended = dray(*words)
        assert ended.returncode == 78
        assert (
            f"there is no image gpu\n  fix:    make image-cpu; the images are {', '.join(VARIANTS)}\n" in ended.stderr
        )
