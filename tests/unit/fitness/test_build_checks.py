"""What a build needs of a machine: each check fails once, with the fix that a user reads, and writes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray.clients import endpoint
from dray.config import checkout as checkouts
from dray.contract.findings import ConfigError, Finding, UnfitError
from dray.fitness import build as builds
from dray.fitness import namespaces, room
from dray.fitness.machine import Build, Machine
from dray.images.sources import inputs, size
from helpers import ROOT

GB = 10**9
VARIANTS = builds.variants(ROOT)
Make = Callable[..., Build]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Linux on x86_64, with room and namespaces, whose Docker is not there."""
    return Machine(
        root=tmp_path / "root",
        environment={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"},
        home=tmp_path / "home",
        uid=1000,
        system="Linux",
        processor="x86_64",
        python=(3, 11, 2),
        has_module=lambda _: True,
        free=lambda _: 999 * GB,
        namespaces=lambda: "",
    )


@pytest.fixture
def build(tmp_path: Path) -> Make:
    """A checkout with nothing fetched."""
    folder = tmp_path / "work"
    shutil.copytree(ROOT / "containers", folder / "containers", symlinks=True)

    def make(variant: str = "cpu", **changes: Any) -> Build:
        return Build(checkout=folder, variant=variant, **changes)

    return make


@pytest.fixture(autouse=True)
def _own_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Apptainer of this machine takes part."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def program(folder: Path, name: str, script: str) -> None:
    """A stand-in for a program of the machine."""
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / name).chmod(0o755)


def listening(path: Path) -> socket.socket:
    """An engine's socket, which answers nobody but a knock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def errors(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.code]


_FAR = "dray needs a Docker Engine on this machine, whose folders it binds"


class TestEndpoint:
    """Docker's own rules: DOCKER_HOST, DOCKER_CONTEXT, the current context, the default."""

    @pytest.fixture
    def home(self, tmp_path: Path) -> Path:
        for name, url in (("colima", "unix:///h/.colima/default/docker.sock"), ("far", "ssh://me@far")):
            meta = tmp_path / ".docker/contexts/meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
            meta.parent.mkdir(parents=True)
            meta.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": {"docker": {"Host": url}}}))
        return tmp_path

    @pytest.mark.parametrize(
        ("environment", "current", "found"),
        [
            ({}, None, "unix:///var/run/docker.sock (Docker's default)"),
            ({}, '{"currentContext": "colima"}', "unix:///h/.colima/default/docker.sock (context colima)"),
            ({}, '{"currentContext": "default"}', "unix:///var/run/docker.sock (Docker's default)"),
            ({}, '{"auths": {}}', "unix:///var/run/docker.sock (Docker's default)"),
            ({}, "{ damaged", "unix:///var/run/docker.sock (Docker's default)"),
            ({}, "[]", "unix:///var/run/docker.sock (Docker's default)"),
            ({"DOCKER_CONTEXT": "colima"}, "{}", "unix:///h/.colima/default/docker.sock (context colima)"),
            ({"DOCKER_CONTEXT": "default"}, '{"currentContext": "colima"}',
             "unix:///var/run/docker.sock (Docker's default)"),
            ({"DOCKER_HOST": "unix:///x", "DOCKER_CONTEXT": "colima"}, None, "unix:///x (DOCKER_HOST)"),
            ({"DOCKER_HOST": ""}, '{"currentContext": "colima"}',
             "unix:///h/.colima/default/docker.sock (context colima)"),
        ],
    )  # fmt: skip
    def test_it_is_found(self, environment: Mapping[str, str], current: str | None, found: str, home: Path) -> None:
        if current is not None:
            (home / ".docker/config.json").write_text(current)
        assert str(endpoint.find(environment, home)) == found

    def test_another_folder_of_the_configuration(self, home: Path, tmp_path: Path) -> None:
        (home / ".docker").rename(tmp_path / "other")
        (tmp_path / "other/config.json").write_text('{"currentContext": "colima"}')
        found = endpoint.find({"DOCKER_CONFIG": str(tmp_path / "other")}, home)
        assert found.source == "context colima"

    @pytest.mark.parametrize(
        ("environment", "problem", "fix"),
        [
            (
                {"DOCKER_HOST": "tcp://10.0.0.1:2376"},
                _FAR,
                "unset DOCKER_HOST",
            ),
            (
                {"DOCKER_CONTEXT": "far"},
                _FAR,
                "docker context use default",
            ),
            ({"DOCKER_CONTEXT": "gone"}, "the Docker context gone does not exist", "docker context ls"),
        ],
    )
    def test_it_is_refused(self, environment: Mapping[str, str], problem: str, fix: str, home: Path) -> None:
        with pytest.raises(ConfigError) as refused:
            endpoint.find(environment, home)
        assert refused.value.problem.startswith(problem)
        assert refused.value.details["fix"].startswith(fix)

    @pytest.mark.parametrize(
        ("path", "error", "problem", "fix"),
        [
            ("/home/me/.docker/desktop/docker.sock", FileNotFoundError(), "Docker Desktop is not running",
             "start Docker Desktop (on Linux: systemctl --user start docker-desktop)"),
            ("/Users/me/.docker/run/docker.sock", ConnectionRefusedError(), "Docker Desktop is not running",
             "start Docker Desktop (on Linux: systemctl --user start docker-desktop)"),
            ("/Users/me/.colima/default/docker.sock", FileNotFoundError(), "colima is not running", "colima start"),
            ("/Users/me/.local/share/containers/podman/machine/podman.sock", ConnectionRefusedError(),
             "the Podman machine is not running", "podman machine start"),
            ("/var/folders/t/podman/podman-machine-default-api.sock", FileNotFoundError(),
             "the Podman machine is not running", "podman machine start"),
            ("/run/podman/podman.sock", FileNotFoundError(), "Podman's service is not running",
             "sudo systemctl start podman.socket"),
            ("/run/user/1000/podman/podman.sock", FileNotFoundError(), "Podman's service is not running",
             "systemctl --user start podman.socket"),
            ("/run/user/1000/docker.sock", FileNotFoundError(), "the rootless Docker Engine is not running",
             "systemctl --user start docker"),
            ("/run/user/1001/docker.sock", PermissionError(), "the rootless Docker Engine refuses this user",
             "use an engine of your own: docker context use default; ls -l /run/user/1001/docker.sock shows its owner"),
            ("/var/run/docker.sock", FileNotFoundError(), "no Docker Engine runs on this machine",
             "install Docker Engine and start it, or set DOCKER_HOST"),
            ("/var/run/docker.sock", TimeoutError(), "the Docker Engine does not answer",
             "start it (sudo systemctl start docker), or set DOCKER_HOST to one that runs"),
        ],
    )  # fmt: skip
    def test_who_does_not_answer(self, path: str, error: Exception, problem: str, fix: str) -> None:
        refused = endpoint.unreachable(endpoint.Endpoint(f"unix://{path}", "context it"), error, {})
        assert (refused.problem, refused.details["where"]) == (problem, f"unix://{path} (context it)")
        assert (refused.details["fix"], refused.exit_code) == (fix, 69)

    @pytest.mark.parametrize(
        ("joined", "groups", "fix"),
        [
            (False, set(), "add yourself to the docker group (sudo usermod -aG docker $USER) and log in again"),
            (True, {"me"}, "log in again (or: newgrp docker): this login is older than your place in the docker group"),
            (True, {"docker"}, "add yourself to the docker group"),
        ],
    )
    def test_the_docker_group(self, joined: bool, groups: set[str], fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(endpoint, "_joined", lambda: joined)
        monkeypatch.setattr(endpoint, "_groups", lambda: groups)
        found = endpoint.Endpoint("unix:///var/run/docker.sock", "Docker's default")
        refused = endpoint.unreachable(found, PermissionError(13, "Permission denied"), {})
        assert refused.problem == "the Docker Engine refuses this user"
        assert refused.details["fix"].startswith(fix)

    def test_an_engine_of_ones_own_is_offered(self, tmp_path: Path) -> None:
        with listening(tmp_path / "docker.sock"):
            default = endpoint.find({}, tmp_path)
            refused = endpoint.unreachable(default, FileNotFoundError(), {"XDG_RUNTIME_DIR": str(tmp_path)})
        assert refused.details["fix"].splitlines()[1:] == [f"or export DOCKER_HOST=unix://{tmp_path}/docker.sock"]

    @pytest.mark.docker
    def test_a_real_engine_says_what_it_is(self) -> None:
        found = endpoint.find(os.environ, checkouts.home())
        endpoint.knock(found)
        assert endpoint.info(found)["OSType"] == "linux"


class TestNamespaces:
    """The kernel's switches, and AppArmor's on Ubuntu."""

    @pytest.mark.parametrize(
        ("switches", "profile", "trial", "container", "found"),
        [
            ({}, "", "", False, "ok"),
            ({"user/max_user_namespaces": "96365"}, "", "", True, "ok"),
            ({"user/max_user_namespaces": "0"}, "", "", False, "sudo sysctl -w user.max_user_namespaces=15000"),
            ({"user/max_user_namespaces": "0"}, "", "no", True, "sudo sysctl -w user.max_user_namespaces=15000"),
            ({"kernel/unprivileged_userns_clone": "0"}, "", "no", True,
             "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
            ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, "", "denied", False,
             "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
            ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, "", "denied", True,
             "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
            ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, "apptainer", "denied", False, "ok"),
            ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, "", "", False, "ok"),
            ({"kernel/apparmor_restrict_unprivileged_userns": "0"}, "", "seccomp", False,
             "ask the administrators for user namespaces"),
            ({}, "", "seccomp", True, "ok"),
        ],
    )  # fmt: skip
    def test_who_may_make_them(
        self, switches: Mapping[str, str], profile: str, trial: str, container: bool, found: str, tmp_path: Path
    ) -> None:
        for name, value in switches.items():
            file = tmp_path / "proc/sys" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        (tmp_path / "etc/apparmor.d").mkdir(parents=True)
        if profile:
            (tmp_path / "etc/apparmor.d" / profile).touch()
        finding = namespaces.check(tmp_path, trial=trial, container=container)
        assert (finding.fix or finding.level).startswith(found)
        assert finding.code == (69 if finding.fix else 0)

    def test_the_trial_is_a_real_one(self) -> None:
        """Apptainer and `unshare` of these tests need them too."""
        assert namespaces.tried() == ""

    @pytest.mark.parametrize("mode", [0o4755, 0o755])
    def test_setuid(self, mode: int, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", f"echo 'LIBEXECDIR={tmp_path}'")
        starter = tmp_path / "apptainer/bin/starter-suid"
        starter.parent.mkdir(parents=True)
        starter.touch()
        starter.chmod(mode)
        assert namespaces.setuid(str(tmp_path / "bin/apptainer")) is (mode == 0o4755)


class TestBuilder:
    """Apptainer of this machine, or Docker."""

    def test_neither(self, build: Make, machine: Machine, tmp_path: Path) -> None:
        (error,) = errors(builds.check(build(), machine))
        assert str(error) == (
            "no Docker Engine runs on this machine\n"
            f"  where:  unix://{tmp_path}/none.sock\n"
            "  found:  [Errno 2] No such file or directory\n"
            "  fix:    load or install Apptainer (module load apptainer), which builds without Docker\n"
            "          or install Docker Engine and start it, or set DOCKER_HOST"
        )

    def test_root_with_apptainer_alone(self, build: Make, machine: Machine, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", "")
        (error,) = errors(builds.check(build(), replace(machine, uid=0)))
        assert error.fix.splitlines()[0] == "run the command as an ordinary user, with this machine's apptainer"

    def test_the_host_s_own_apptainer(self, build: Make, machine: Machine, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", "")
        program(tmp_path, "mksquashfs", "echo '-all-time -mkfs-time -root-mode -no-xattrs zstd'")
        findings = builds.check(build(), machine)
        assert not errors(findings)
        assert {finding.problem for finding in findings} == {
            "image cpu", "processor", "Python", "builder", "mksquashfs", "user namespaces"
        }  # fmt: skip
        (docker,) = errors(builds.check(build(formats=["docker"]), machine))
        assert docker.fix == "install Docker Engine and start it, or set DOCKER_HOST"

    @pytest.mark.parametrize(
        ("script", "found"),
        [
            ("echo '-all-time -mkfs-time -root-mode -no-xattrs gzip'", "a version without zstd"),
            ("echo '-no-xattrs zstd' >&2; exit 1", "a version without -root-mode -all-time -mkfs-time"),
        ],
    )
    def test_an_old_mksquashfs(self, script: str, found: str, build: Make, machine: Machine, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", "")
        program(tmp_path, "mksquashfs", script)
        (error,) = errors(builds.check(build(), machine))
        assert (error.wanted, error.found) == ("squashfs-tools 4.4 or newer, with zstd", found)
        assert errors(builds.check(build(formats=["podman"]), machine))[0].problem == "podman is not on this machine"

    def test_no_mksquashfs(self, build: Make, machine: Machine, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", "")
        (error,) = errors(builds.check(build(), machine))
        assert (error.problem, error.fix) == ("mksquashfs is not installed", "install squashfs-tools 4.4 or newer")

    def test_the_host_s_own_apptainer_and_a_space(self, build: Make, machine: Machine, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", "")
        program(tmp_path, "mksquashfs", "echo '-all-time -mkfs-time -root-mode -no-xattrs zstd'")
        (error,) = errors(builds.check(build(out=tmp_path / "my images" / "x.sif"), machine))
        assert (error.problem, error.code) == ("apptainer cannot use a folder whose path has a space", 78)

    def test_apptainer_without_namespaces(self, build: Make, machine: Machine, tmp_path: Path) -> None:
        program(tmp_path, "apptainer", "")
        program(tmp_path, "mksquashfs", "echo '-all-time -mkfs-time -root-mode -no-xattrs zstd'")
        (error,) = errors(builds.check(build(), replace(machine, namespaces=lambda: "[Errno 1] not permitted")))
        assert (error.found, error.code) == ("[Errno 1] not permitted", 69)

    @pytest.mark.parametrize(("free", "count"), [(0.3 * GB, 1), (0.5 * GB, 0)])
    def test_docker_s_own_disk(
        self, free: float, count: int, build: Make, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel = os.uname().release
        monkeypatch.setattr(endpoint, "info", lambda _: {"KernelVersion": kernel, "DockerRootDir": str(tmp_path)})
        with listening(tmp_path / "d.sock"):
            here = replace(machine, environment={"DOCKER_HOST": f"unix://{tmp_path}/d.sock"})
            disks = replace(here, free=lambda folder: int(free if folder == tmp_path else 99 * GB))
            found = errors(builds.check(build(), disks))
        assert [error.problem for error in found] == ["Docker's disk has no room for the images"] * count

    @pytest.mark.parametrize(
        ("about", "count"),
        [
            ({"KernelVersion": os.uname().release}, 1),
            ({"KernelVersion": os.uname().release, "SecurityOptions": ["name=seccomp", "name=rootless"]}, 0),
            ({"KernelVersion": "6.10.14-linuxkit", "OperatingSystem": "Docker Desktop"}, 0),  # a machine of its own
        ],
    )
    def test_ubuntu_s_apparmor_and_docker(
        self, about: Any, count: int, build: Make, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        switch = machine.root / "proc/sys/kernel/apparmor_restrict_unprivileged_userns"
        switch.parent.mkdir(parents=True)
        switch.write_text("1\n")
        monkeypatch.setattr(endpoint, "info", lambda _: about)
        with listening(tmp_path / "d.sock"):
            environment = {"DOCKER_HOST": f"unix://{tmp_path}/d.sock"}
            there = replace(machine, environment=environment, namespaces=lambda: "[Errno 13] Permission denied")
            found = errors(builds.check(build(), there))
        assert len(found) == count
        assert all("apparmor_restrict_unprivileged_userns is 1" in error.found for error in found)


class TestMachine:
    """Processor, system, Python, sudo."""

    @pytest.mark.parametrize(
        ("variant", "system", "processor", "problem", "fix"),
        [
            ("cuda", "Linux", "x86_64", "", ""),
            ("cuda", "Linux", "aarch64", "", ""),
            ("cpu", "Linux", "aarch64", "torch has no wheels of cpu for aarch64",
             "make image-cuda, for aarch64; or use the site's own image: dray image adopt FILE"),
            ("cuda12", "Linux", "aarch64", "torch has no wheels of cuda12 for aarch64",
             "make image-cuda, for aarch64; or use the site's own image: dray image adopt FILE"),
            ("rocm", "Linux", "ppc64le", "torch has no wheels of rocm for ppc64le",
             "build on a machine with x86_64; or use the site's own image: dray image adopt FILE"),
            ("cuda", "Darwin", "arm64", "dray builds images only on Linux",
             "build on a Linux machine with the nodes' processor, such as a login node; or use the site's "
             "own image: dray image adopt FILE"),
            ("cpu", "Darwin", "x86_64", "dray builds images only on Linux", "build on a Linux machine with the nodes'"),
        ],
    )  # fmt: skip
    def test_the_processor(
        self, variant: str, system: str, processor: str, problem: str, fix: str, build: Make, machine: Machine
    ) -> None:
        findings = builds.check(build(variant), replace(machine, system=system, processor=processor))
        found = [error for error in errors(findings) if "Docker" not in error.problem]
        assert [error.problem for error in found] == [problem][: bool(problem)]
        assert all(error.fix.startswith(fix) and error.code == 69 for error in found)

    @pytest.mark.parametrize(
        ("python", "missing", "problem", "fix"),
        [
            ((3, 9, 18), "", "this Python is too old for dray", "make PYTHON=python3.11"),
            (
                (3, 12, 3),
                "ensurepip",
                "this Python cannot make virtual environments",
                "sudo apt-get install python3-venv",
            ),
            ((3, 12, 3), "venv", "this Python cannot make virtual environments", "sudo apt-get install python3-venv"),
            ((3, 14, 0), "", "", ""),
        ],
    )
    def test_python(
        self, python: tuple[int, ...], missing: str, problem: str, fix: str, build: Make, machine: Machine
    ) -> None:
        there = replace(machine, python=python, has_module=lambda name: name != missing)
        found = [error for error in errors(builds.check(build(), there)) if "Python" in error.problem]
        assert [error.problem for error in found] == [problem][: bool(problem)]
        assert all(error.fix.startswith(fix) for error in found)

    def test_an_environment_that_is_there_needs_no_other(self, build: Make, machine: Machine) -> None:
        (build().checkout / ".venv").mkdir()
        (build().checkout / ".venv/host").touch()
        there = replace(machine, has_module=lambda _: False)
        assert not [error for error in errors(builds.check(build(), there)) if "Python" in error.problem]

    @pytest.mark.parametrize(
        ("uid", "environment", "owner", "refused"),
        [
            (0, {"SUDO_UID": "1000", "SUDO_USER": "ann"}, 1000, True),
            (0, {}, 1000, False),  # root of a container, with a user's folder bound
            (0, {"SUDO_UID": "1000"}, 0, False),  # root's own checkout
            (1000, {"SUDO_UID": "0"}, 1000, False),  # from root to an ordinary user
        ],
    )
    @pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
    def test_sudo(
        self, uid: int, environment: Mapping[str, str], owner: int, refused: bool, build: Make, machine: Machine
    ) -> None:
        os.chown(build().checkout, owner, owner)
        findings = builds.check(build(), replace(machine, uid=uid, environment=environment))
        assert (len(findings) == 1 and findings[0].code == 78) is refused
        if refused:
            assert findings[0].fix == (
                "make image-cpu\nif Docker refuses you, first sudo usermod -aG docker ann\nand log in again"
            )

    @pytest.mark.parametrize(("variant", "near"), [("gpu", "cpu"), ("cuba", "cuda"), ("rocm7", "rocm"), ("x", "cpu")])
    def test_an_unknown_variant(self, variant: str, near: str, build: Make, machine: Machine) -> None:
        (finding,) = builds.check(build(variant), machine)
        assert (finding.code, finding.problem) == (78, f"there is no image {variant}")
        assert finding.fix == f"make image-{near}; the images are {', '.join(VARIANTS)}"


class TestRoom:
    """On one disk or two, with what is fetched already."""

    def check(self, build: Build, machine: Machine) -> list[Finding]:
        return list(room.check(build, {"wheels_mb": 500, "unpacked_mb": 1600, "sif_mb": 460}, machine))

    @pytest.mark.parametrize(
        ("changes", "needs", "fetched"),
        [
            ({}, 3.2, "fetch 0.6 GB"),
            ({"formats": ["docker"]}, 3.8, "fetch 0.6 GB"),
            ({"formats": ["sif", "docker"]}, 4.7, "fetch 0.6 GB"),
            ({"bundled": True}, 2.6, "almost nothing to fetch"),
        ],
    )
    def test_what_is_needed(
        self, changes: Mapping[str, Any], needs: float, fetched: str, build: Make, machine: Machine
    ) -> None:
        enough = replace(machine, free=lambda _: int((needs + 0.1) * GB))
        free = f"({needs + 0.1:.0f} GB free)"
        assert self.check(build(**changes), enough) == [
            Finding("image cpu", found=f"{fetched}, needs {needs} GB in build/ {free}", kind="ok")
        ]
        less = replace(machine, free=lambda _: int((needs - 0.1) * GB))
        error, _ = self.check(build(**changes), less)
        assert (error.code, error.problem) == (69, "there is not enough disk space to build the image cpu")
        assert error.wanted.startswith(f"{needs} GB: ")
        assert error.found == f"{int((needs - 0.1) * GB) / GB:.1f} GB free"

    def test_an_image_that_is_there_may_need_no_build(self, build: Make, machine: Machine) -> None:
        build().sif.parent.mkdir()
        build().sif.touch()
        full = replace(machine, free=lambda _: 0)
        assert self.check(build(), full)[0].code == 69  # something is to be fetched: the inputs are others
        note, _ = self.check(build(bundled=True), full)
        assert (note.code, note.kind) == (0, "note")
        assert self.check(build(bundled=True, formats=["docker"]), full)[0].code == 69

    def test_what_is_fetched_counts(self, build: Make, machine: Machine, tmp_path: Path) -> None:
        folders = [build().checkout / "build" / name for name in ("wheels", "base", "debs/0")]
        for folder in (*folders, tmp_path / "mine"):
            folder.mkdir(parents=True)
        pins = re.findall(r"^(transformers|numpy)==(\S+)", build().locks[-1].read_text(), re.MULTILINE)
        versions = dict(pins)
        for folder, name in (
            (folders[0], f"numpy-{versions['numpy']}-cp311-cp311-manylinux_2_28_x86_64.whl"),
            (folders[0], "numpy-0.1-cp311-cp311-manylinux_2_28_x86_64.whl"),  # of another lock
            (tmp_path / "mine", f"transformers-{versions['transformers']}-py3-none-any.whl"),
            (folders[1], "bookworm.tar"),
            (folders[2], "gcc_1_amd64.deb"),
        ):
            with (folder / name).open("wb") as file:
                file.truncate(200_000_000)
        ((finding),) = self.check(build(wheels=tmp_path / "mine"), machine)
        assert finding.found.startswith("fetch 0.1 GB, needs 2.7 GB in build/")

    def test_two_disks(self, build: Make, machine: Machine) -> None:
        """/dev is one of its own on any Linux."""
        there = replace(machine, free=lambda folder: 2 * GB if folder == Path("/dev") else GB)
        error, ok = self.check(build(out=Path("/dev/x.sif")), there)
        assert (error.where, error.found) == ("/dev", "2.0 GB free")
        assert error.fix == (
            "make room; or build on another disk, after make install:\n"
            ".venv/bin/dray image build cpu --out FOLDER/x.sif"
        )
        assert ok.found == "fetch 0.6 GB, needs 0.6 GB in build/ (1 GB free), needs 2.6 GB in /dev (2 GB free)"

    def test_a_new_variant_that_nobody_has_measured(self, build: Make, machine: Machine) -> None:
        (note,) = room.check(build(), None, machine)
        assert (note.kind, note.fix) == ("note", "dray image lock cpu writes it")

    @pytest.mark.parametrize(
        ("kind", "point", "noted"),
        [
            ("lustre", "HERE", True), ("nfs4", "HERE", True), ("gpfs", "/", True), ("wekafs", "HERE", True),
            ("fuse.sshfs", "HERE", True), ("ext4", "HERE", False), ("lustre", "HERE/elsewhere", False), ("", "", False),
        ],
    )  # fmt: skip
    def test_a_network_disk(self, kind: str, point: str, noted: bool, build: Make, machine: Machine) -> None:
        checkout = build().checkout
        (machine.root / "proc/self").mkdir(parents=True)
        written = point.replace("HERE", str(checkout)).replace(" ", "\\040")
        lines = [f"server:/x {written} {kind} rw 0 0"] if kind else []
        (machine.root / "proc/self/mounts").write_text("\n".join(["overlay / overlay rw 0 0", *lines]))
        found = list(room.disk(build(), machine))
        assert [finding.kind for finding in found] == ["note"] * noted
        assert all(f"({kind})" in finding.found and "--out /tmp/dray-cpu.sif" in finding.fix for finding in found)


class TestSizes:
    """What image.toml says is true of the locks, and of the cpu image."""

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_locks_that_were_summed(self, variant: str) -> None:
        image = inputs.image(ROOT, variant)
        assert image.size
        assert image.size.locks == size.digests(ROOT, image), f"dray image lock {variant}"
        assert image.size.wheels_mb > sum(vendor.mb or 0 for vendor in image.vendor)
        assert all(vendor.mb for vendor in image.vendor)
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

    def test_it_is_written_into_image_toml(self) -> None:
        text = 'a = 1\n\n[size]\nlocks = ["0000000000000000"]\nwheels_mb = 1 # why\nunpacked_mb = 7\n\n[labels]\n'
        written = size.written(text, ["1" * 16, "2" * 16], 500)
        assert written == text.replace('["0000000000000000"]', f'["{"1" * 16}", "{"2" * 16}"]').replace(
            "= 1 #", "= 500 #"
        )
        new = tomllib.loads(size.written("a = 1\n", ["1" * 16], 500))
        assert new["size"] == {"locks": ["1" * 16], "wheels_mb": 500, "unpacked_mb": 1500, "sif_mb": 500}


class TestCommands:
    """As users type them; nothing may be written."""

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        copy = tmp_path / "a clone"
        copy.mkdir()
        for name in ("containers", "src"):
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, copy)
        return copy

    def make(self, copy: Path, target: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER", "SUDO", "DRAY"))}
        path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHON": "/usr/bin/env python3"}
        before = sorted(copy.rglob("*"))
        ended = subprocess.run(
            ["make", "--silent", target], cwd=copy, env={**kept, **path, **environment}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert sorted(copy.rglob("*")) == before
        return ended

    def test_a_context_whose_engine_is_not_started(self, copy: Path, tmp_path: Path) -> None:
        meta = tmp_path / "docker/contexts/meta" / hashlib.sha256(b"desktop-linux").hexdigest() / "meta.json"
        meta.parent.mkdir(parents=True)
        url = f"unix://{tmp_path}/.docker/desktop/docker.sock"
        meta.write_text(json.dumps({"Name": "desktop-linux", "Endpoints": {"docker": {"Host": url}}}))
        (tmp_path / "docker/config.json").write_text('{"currentContext": "desktop-linux"}')
        ended = self.make(copy, "image-cpu-docker", DOCKER_CONFIG=str(tmp_path / "docker"))
        assert ended.stderr.startswith("dray: image cpu: fetch 0.7 GB, needs 3.9 GB in build/ (")
        assert (
            "dray: Docker Desktop is not running\n"
            f"  where:  {url} (context desktop-linux)\n"
            "  found:  [Errno 2] No such file or directory\n"
            "  fix:    start Docker Desktop (on Linux: systemctl --user start docker-desktop)\n"
        ) in ended.stderr
        assert "Error 69" in ended.stderr

    @pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be sudo's")
    def test_sudo_make(self, copy: Path) -> None:
        os.chown(copy, 1000, 1000)
        ended = self.make(copy, "image-cpu", SUDO_UID="1000", SUDO_USER="ann")
        assert ended.stderr.splitlines()[0].startswith("dray: dray builds without root, and sudo would leave root's")
        assert "  where:  " + str(copy) in ended.stderr
        assert "Error 78" in ended.stderr

    def test_an_old_python(self, copy: Path, tmp_path: Path) -> None:
        program(tmp_path, "python3.9", "case $1 in --version) echo Python 3.9.2;; *) exit 1;; esac")
        ended = self.make(copy, "image-cpu", PYTHON=str(tmp_path / "bin/python3.9"))
        assert "dray needs Python 3.11 or newer; this is Python 3.9.2. Set PYTHON=python3.11\n" in ended.stderr

    @pytest.mark.seconds
    @pytest.mark.parametrize("words", [["image", "build", "gpu"], ["doctor", "--build", "gpu"]])
    def test_dray_itself(self, words: list[str]) -> None:
        ended = subprocess.run([sys.executable, "-m", "dray", *words], capture_output=True, text=True, check=False)
        assert (ended.returncode, "there is no image gpu" in ended.stdout + ended.stderr) == (78, True)

    def test_it_needs_the_standard_library_alone(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import dray.fitness.build"
        ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_make_prints_what_matters(build: Make, machine: Machine) -> None:
    findings = [
        Finding("image cpu", found="fetch 0.6 GB", kind="ok"),
        Finding("Python", found="3.11", kind="ok"),
        Finding("builder", found="Docker at unix:///x", kind="ok"),
        Finding("scratch", found="a network disk (nfs)", fix="move", kind="note"),
        UnfitError("no", fix="yes").finding,
        ConfigError("never").finding,
    ]
    said: list[str] = []
    assert builds.show(findings, said.append) == 78
    assert said == [
        "dray: image cpu: fetch 0.6 GB",
        "dray: builder: Docker at unix:///x",
        "dray: scratch: a network disk (nfs)\n  fix:    move",
        "dray: no\n  fix:    yes",
        "dray: never",
    ]
