"""The Docker Engine: what a user reads when it is not there, and what a build says."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from docker.errors import ImageNotFound

from dray.clients import builder, builder_container, docker
from dray.contract.findings import ConfigError, DrayError, UnfitError
from helpers import ROOT


@pytest.fixture
def engine():
    with closing(docker.client()) as client:
        yield client


def refusal(monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(UnfitError) as refused:
        docker.client()
    return str(refused.value)


def test_no_engine(monkeypatch, tmp_path):
    assert refusal(monkeypatch, f"unix://{tmp_path}/none.sock") == (
        "no Docker Engine runs on this machine\n"
        f"  where:  unix://{tmp_path}/none.sock (DOCKER_HOST)\n"
        "  found:  [Errno 2] No such file or directory\n"
        "  fix:    install Docker Engine and start it, or set DOCKER_HOST"
    )


def test_an_engine_that_has_stopped_leaves_its_socket(monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    assert refusal(monkeypatch, f"unix://{tmp_path}/s") == (
        "the Docker Engine does not answer\n"
        f"  where:  unix://{tmp_path}/s (DOCKER_HOST)\n"
        "  found:  [Errno 111] Connection refused\n"
        "  fix:    start it (sudo systemctl start docker), or set DOCKER_HOST to one that runs"
    )


@pytest.mark.docker
def test_a_build_gives_the_id_of_what_it_tagged(engine, tmp_path):
    (tmp_path / "file").write_text("content\n")
    (tmp_path / "Containerfile").write_text("FROM scratch AS first\nCOPY file /\nFROM first\nCOPY file /again\n")
    lines = []
    built = docker.build(
        engine,
        tmp_path,
        tag="dray-test-build",
        base="",
        target="first",
        on_line=lines.append,
    )
    try:
        assert engine.images.get("dray-test-build").id == built
        assert lines[-1] == "Successfully tagged dray-test-build:latest"
        assert not any("again" in line for line in lines)
    finally:
        engine.images.remove("dray-test-build")


@pytest.mark.docker
def test_a_build_that_fails_shows_its_last_lines(engine, tmp_path):
    (tmp_path / "Containerfile").write_text("FROM scratch\nCOPY missing /\n")
    with pytest.raises(DrayError) as failed:
        docker.build(
            engine,
            tmp_path,
            tag="dray-test-build",
            base="",
            target="",
            on_line=lambda _: None,
        )
    assert failed.value.problem.startswith("building dray-test-build failed: COPY failed:")
    assert failed.value.details == {
        "found": "Step 1/2 : FROM scratch\n ---> \nStep 2/2 : COPY missing /",
    }


@pytest.mark.docker
def test_a_rootfs_is_imported_once(engine, tmp_path):
    rootfs = tmp_path / "my base.tar"
    with tarfile.open(rootfs, "w") as tar:
        tar.addfile(tarfile.TarInfo("only-in-this-test"), io.BytesIO())
    reference = docker.base_image(engine, str(rootfs), say=print)
    try:
        made = engine.images.get(reference).id
        assert docker.base_image(engine, str(rootfs), say=print) == reference
        assert engine.images.get(reference).id == made
        assert docker.base_image(engine, reference, say=print) == reference
    finally:
        engine.images.remove(reference)
    with pytest.raises(ImageNotFound):
        engine.images.get(reference)


@pytest.mark.docker
def test_a_rootfs_that_is_not_there(engine, tmp_path):
    with pytest.raises(ConfigError) as refused:
        docker.base_image(engine, f"{tmp_path}/base.tar", say=print)
    assert str(refused.value) == (
        "the tar of the base does not exist\n"
        f"  found:  {tmp_path}/base.tar\n"
        f"  fix:    make one: containers/base/make-base.sh trixie {tmp_path}/base.tar"
    )


@pytest.mark.parametrize(
    ("hosts", "environment", "network"),
    [
        (
            "127.0.0.1 localhost\n127.0.1.1 me.example me\n::1 localhost ip6-localhost ip6-loopback\n# x\n",
            {},
            "default",
        ),
        ("127.0.0.1 localhost localhost.localdomain\n", {"https_proxy": "http://proxy.example:3128"}, "default"),
        ("127.0.0.1 localhost\n", {"HTTPS_PROXY": "http://127.0.0.1:3128"}, "host"),
        ("127.0.0.1 localhost\n", {"http_proxy": "localhost:3128"}, "host"),
        ("127.0.0.1 localhost\n10.0.0.5 registry.example\n", {}, "host"),
    ],
)
def test_the_network_of_a_fetch(monkeypatch, tmp_path, hosts, environment, network):
    """Docker's own, in which a base's programs reach nothing of this machine, wherever that does."""
    (tmp_path / "hosts").write_text(hosts)
    monkeypatch.setattr(builder_container, "_HOSTS", tmp_path / "hosts")
    monkeypatch.setattr(builder_container.socket, "gethostname", lambda: "me")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert builder_container.fetching() == network


@pytest.mark.docker
def test_a_program_of_a_base_gains_no_rights(monkeypatch):
    """Nor is it root, or has a network."""
    script = "grep -E '^(NoNewPrivs|CapEff)' /proc/self/status; id -u; ls /sys/class/net"
    lines: list[str] = []
    monkeypatch.setattr(builder.process, "apptainer", lambda: None)
    builder.run(ROOT, ["sh", "-c", script], binds={}, on_line=lines.append)
    assert " ".join(lines).split() == [
        "CapEff:",
        "0" * 16,
        "NoNewPrivs:",
        "1",
        str(builder_container.caller()[0]),
        "lo",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="who builds is another user only for root")
def test_a_file_of_roots_that_only_root_may_read(tmp_path):
    file, secret = tmp_path / "x.whl", tmp_path / "env"
    file.touch(0o644)
    builder_container.require_readable(file)
    secret.touch(0o600)
    builder_container.give(secret)
    builder_container.require_readable(secret)
    file.chmod(0o600)
    with pytest.raises(UnfitError) as refused:
        builder_container.require_readable(file)
    assert refused.value.details == {"where": str(file), "fix": f"chmod -R a+rX '{file}'"}


@pytest.mark.skipif(os.geteuid() != 0, reason="who builds is another user only for root")
def test_a_folder_of_roots_is_lent_whole_and_taken_back(tmp_path):
    inner = tmp_path / "lib/deep/module.py"
    inner.parent.mkdir(parents=True)
    inner.touch()
    (tmp_path / "link").symlink_to("/etc/passwd")
    builder_container.give(tmp_path)
    assert {path.lstat().st_uid for path in (tmp_path, *tmp_path.rglob("*"))} == {1000}
    assert Path("/etc/passwd").stat().st_uid == 0
    builder_container.take(tmp_path)
    assert {path.lstat().st_uid for path in (tmp_path, *tmp_path.rglob("*"))} == {0}


_FAR = "dray needs a Docker Engine on this machine, whose folders it binds"


class TestEndpoint:
    """Docker's own rules: DOCKER_HOST, DOCKER_CONTEXT, the current context, the default."""

    @pytest.fixture
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / ".docker").mkdir()
        (tmp_path / ".docker/config.json").write_text("{}")
        for name, url in (("colima", "unix:///h/.colima/default/docker.sock"), ("far", "ssh://me@far")):
            meta = tmp_path / ".docker/contexts/meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
            meta.parent.mkdir(parents=True)
            meta.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": {"docker": {"Host": url}}}))
        damaged = meta.parent.with_name(hashlib.sha256(b"damaged").hexdigest())
        damaged.mkdir()
        (damaged / "meta.json").write_text("{")
        return tmp_path

    @pytest.mark.parametrize(
        ("environment", "current", "found"),
        [
            ({}, "{}", "unix:///var/run/docker.sock (context default)"),
            ({}, '{"currentContext": "colima"}', "unix:///h/.colima/default/docker.sock (context colima)"),
            ({}, '{"currentContext": "default"}', "unix:///var/run/docker.sock (context default)"),
            ({}, '{"currentContext": ""}', "unix:///var/run/docker.sock (context default)"),
            ({}, '{"auths": {}}', "unix:///var/run/docker.sock (context default)"),
            ({}, "{ damaged", "unix:///var/run/docker.sock (context default)"),
            ({}, "[]", "unix:///var/run/docker.sock (context default)"),
            ({"DOCKER_CONTEXT": "colima"}, "{}", "unix:///h/.colima/default/docker.sock (context colima)"),
            ({"DOCKER_CONTEXT": "default"}, '{"currentContext": "colima"}',
             "unix:///var/run/docker.sock (context default)"),
            ({"DOCKER_HOST": "unix:///x", "DOCKER_CONTEXT": "colima"}, "{}", "unix:///x (DOCKER_HOST)"),
            ({"DOCKER_HOST": ""}, '{"currentContext": "colima"}',
             "unix:///h/.colima/default/docker.sock (context colima)"),
        ],
    )  # fmt: skip
    def test_it_is_found(
        self, environment: Mapping[str, str], current: str, found: str, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (home / ".docker/config.json").write_text(current)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert str(docker.endpoint()) == found

    def test_another_folder_of_the_configuration(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (home / ".docker").rename(tmp_path / "other")
        (tmp_path / "other/config.json").write_text('{"currentContext": "colima"}')
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "other"))
        assert docker.endpoint().source == "context colima"

    @pytest.mark.parametrize(
        ("name", "value", "problem", "fix"),
        [
            ("DOCKER_HOST", "tcp://10.0.0.1:2376", _FAR, "unset DOCKER_HOST"),
            ("DOCKER_CONTEXT", "far", _FAR, "docker context ls"),
            ("DOCKER_CONTEXT", "gone", "the Docker context gone does not exist", "docker context ls"),
            ("DOCKER_CONTEXT", "damaged", "the Docker context damaged cannot be read", "docker context ls"),
        ],
    )
    def test_it_is_refused(
        self, name: str, value: str, problem: str, fix: str, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as refused:
            docker.endpoint()
        assert refused.value.problem == problem
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
            ("/run/user/1001/docker.sock", PermissionError(), "the engine refuses this user",
             "use an engine of your own: docker context use default; ls -l /run/user/1001/docker.sock shows its owner"),
            ("/var/run/docker.sock", PermissionError(), "the Docker Engine refuses this user",
             "add yourself to the docker group (sudo usermod -aG docker $USER) and log in again"),
            ("/var/run/docker.sock", FileNotFoundError(), "no Docker Engine runs on this machine",
             "install Docker Engine and start it, or set DOCKER_HOST"),
            ("/var/run/docker.sock", TimeoutError(), "the Docker Engine does not answer",
             "start it (sudo systemctl start docker), or set DOCKER_HOST to one that runs"),
        ],
    )  # fmt: skip
    def test_who_does_not_answer(self, path: str, error: Exception, problem: str, fix: str) -> None:
        refused = docker.unreachable(docker.Endpoint(f"unix://{path}", "context it"), error)
        assert (refused.problem, refused.details["where"]) == (problem, f"unix://{path} (context it)")
        assert (refused.details["fix"], refused.exit_code) == (fix, 69)

    def test_an_engine_of_ones_own_is_offered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        (tmp_path / "docker.sock").touch()
        default = docker.Endpoint("unix:///var/run/docker.sock", "context default")
        refused = docker.unreachable(default, FileNotFoundError())
        assert refused.details["fix"].splitlines()[1:] == [f"or export DOCKER_HOST=unix://{tmp_path}/docker.sock"]
