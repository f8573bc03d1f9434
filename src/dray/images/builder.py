"""Where the host has Docker but no Apptainer for an ordinary user: the same build inside a container."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from docker.types import Mount

from dray import dockerd
from dray.errors import DrayError, UnfitError
from dray.images import inputs as build_inputs
from dray.images.sif import IMAGE, local_base

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

TAG = "dray:builder"
_HOME = Path("/dray")


def image(client: docker.DockerClient, checkout: Path, on_line: Callable[[str], None]) -> str:
    """The image with Apptainer and spython, built where it is not yet."""
    context = checkout / "containers" / "cluster"
    return dockerd.build(
        client,
        context=context,
        dockerfile="Containerfile",
        tag=TAG,
        args={"UID": str(user()), "BASE": _base(client, context / "Containerfile")},
        target="builder",
        on_line=on_line,
    )


def _base(client: docker.DockerClient, containerfile: Path) -> str:
    default = re.findall(r"^ARG BASE=(\S+)$", containerfile.read_text(), re.MULTILINE)
    try:
        return dockerd.base_image(client, os.environ.get("DRAY_CLUSTER_BASE") or default[0])
    except UnfitError as error:
        error.details["fix"] = (
            "containers/base/make-base.sh trixie build/base/trixie.tar\nand set DRAY_CLUSTER_BASE to that path"
        )
        raise


def user() -> int:
    """Who builds inside: the caller, or Debian's first ordinary user when that is root."""
    return os.getuid() or 1000


@contextmanager
def container(
    client: docker.DockerClient, image: str, command: list[str], *, mounts: list[Mount], environment: dict[str, str]
) -> Iterator[Container]:
    """A container in which an ordinary user's Apptainer works; gone afterwards, whatever happens."""
    host = client.api.create_host_config(
        mounts=mounts,
        # Apptainer makes user and mount namespaces of its own; it needs no capability for that.
        security_opt=["seccomp=unconfined", "apparmor=unconfined"],
    )
    made = client.api.create_container(
        image,
        command,
        name=f"dray-builder-{secrets.token_hex(4)}",
        environment=environment,
        # systempaths=unconfined in Docker's own client: no user namespace may mount /proc where parts are masked.
        host_config={**host, "MaskedPaths": [], "ReadonlyPaths": []},
    )
    started = client.containers.get(made["Id"])
    try:
        started.start()
        yield started
    finally:
        started.remove(force=True)


def build(
    client: docker.DockerClient,
    *,
    checkout: Path,
    inputs: Path,
    base: str,
    scratch: Path,
    on_line: Callable[[str], None],
) -> None:
    """dray.images.sif.build, inside."""
    mounts = [_bind(checkout / "src", "src"), _bind(inputs, "inputs"), _bind(scratch, "scratch", read_only=False)]
    path = local_base(base)
    if path:
        mounts.append(_bind(path, f"base-{path.name}"))
        base = str(_HOME / f"base-{path.name}")
    _hand_over(scratch, inputs / "host" / "env")
    command = ["python3", "-m", "dray.images.sif", str(_HOME / "inputs"), base, str(_HOME / "scratch")]
    environment = build_inputs.proxies(os.environ) | {
        "PYTHONPATH": str(_HOME / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if (inputs / "host" / "ca.crt").exists():
        environment["SSL_CERT_FILE"] = str(_HOME / "inputs" / "host" / "ca.crt")
    on_line("dray: builder")
    tools = image(client, checkout, on_line)
    with (
        dockerd.doing("build in a container"),
        container(client, tools, command, mounts=mounts, environment=environment) as inside,
    ):
        for line in _lines(inside.logs(stream=True)):
            on_line(line)
        code = int(inside.wait()["StatusCode"])
    if code != 0:
        raise DrayError(f"the build in a container failed with exit code {code}")
    os.chown(scratch / IMAGE, os.getuid(), os.getgid())


def _bind(source: Path, name: str, *, read_only: bool = True) -> Mount:
    return Mount(target=str(_HOME / name), source=str(source), type="bind", read_only=read_only)


def _hand_over(*paths: Path) -> None:
    """Root's own files are not the ordinary user's to read."""
    if os.getuid() == 0:
        for path in paths:
            os.chown(path, user(), user())


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Docker cuts the stream anywhere."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
