"""The Docker Engine: what a user reads when it is not there, and what a build says."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from contextlib import closing

import pytest
from docker.errors import ImageNotFound

from dray.clients import builder, docker, sandbox
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
        f"  where:  unix://{tmp_path}/none.sock\n"
        "  found:  [Errno 2] No such file or directory\n"
        "  fix:    install Docker Engine and start it, or set DOCKER_HOST"
    )


def test_an_engine_that_has_stopped_leaves_its_socket(monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    assert refusal(monkeypatch, f"unix://{tmp_path}/s") == (
        "the Docker Engine does not answer\n"
        f"  where:  unix://{tmp_path}/s\n"
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
        context=tmp_path,
        dockerfile="Containerfile",
        tag="dray-test-build",
        args={},
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
            context=tmp_path,
            dockerfile="Containerfile",
            tag="dray-test-build",
            args={},
            target=None,
            on_line=lambda _: None,
        )
    assert failed.value.problem.startswith("building dray-test-build failed: COPY failed:")
    assert failed.value.details == {
        "where": f"{tmp_path}/Containerfile",
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
    monkeypatch.setattr(sandbox, "_HOSTS", tmp_path / "hosts")
    monkeypatch.setattr(sandbox.socket, "gethostname", lambda: "me")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sandbox.fetching() == network


@pytest.mark.docker
def test_a_program_of_a_base_gains_no_rights(engine):
    """Nor is it root, or has a network."""
    script = "grep -E '^(NoNewPrivs|CapEff)' /proc/self/status; id -u; ls /sys/class/net"
    image = builder.image(engine, ROOT, print)
    with sandbox.started(engine, image, ["sh", "-c", script], mounts=[], environment={}) as running:
        assert running.wait()["StatusCode"] == 0
        lines = running.logs().decode().split()
    assert lines == ["CapEff:", "0" * 16, "NoNewPrivs:", "1", str(sandbox.caller()[0]), "lo"]
