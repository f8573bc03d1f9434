"""Programs that need Apptainer or squashfs-tools: this machine's own, or those of the builder container."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from docker.errors import ImageNotFound
from docker.types import Mount
from docker.utils.json_stream import split_buffer

from dray import process
from dray.clients import builder_container, docker
from dray.clients.builder_container import FUSE, renamed
from dray.config import dray_home as checkouts
from dray.config import mirrors
from dray.contract import exit_codes, findings
from dray.contract.files import write_atomic
from dray.contract.findings import ConfigError, DrayError, Finding, UnfitError
from dray.process import Done

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

TAG = "dray:builder"
# The first word of argv for Apptainer, whatever its name on this machine.
APPTAINER = "apptainer"
_INSTALL = "install apptainer and squashfs-tools"
# An image of a registry may have tens of gigabytes.
_LONGEST_S = 4 * 3600.0


class BuildError(DrayError):
    """A program of the build has failed; its last lines say why."""


def run(
    checkout: Path,
    argv: Sequence[str | Path],
    *,
    binds: Mapping[Path, bool],
    on_line: Callable[[str], None],
    network: bool = False,
    saved: Path | None = None,
) -> None:
    """Run a module of dray's that needs Apptainer. `binds` has the paths in argv, and whether the module writes there.

    `saved` is the builder's image in a bundle. Without `network` the container has none; this machine's own Apptainer
    still has it.
    """
    errors: list[Finding] = []

    def read(line: str) -> None:
        finding = findings.decode(line)
        errors.append(finding) if finding else on_line(line)

    with engine() as client:
        if client is None:
            code = process.follow([sys.executable, *argv[1:]], on_line=read)
        else:
            if saved and saved.exists():
                with docker.attempt(f"load {saved}"), saved.open("rb") as file:
                    tools = str(client.images.load(file)[0].id)
            else:
                tools = image(client, checkout, on_line)
            source = checkout / "src"
            environment = {"PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1"}
            with (
                docker.attempt("build in a container"),
                _started(
                    client, tools, argv, binds={source: False, **binds}, environment=environment, network=network
                ) as (running, outside),
            ):
                for line in split_buffer(running.logs(stream=True)):
                    read(outside(line.rstrip("\r\n")))
                code = int(running.wait()["StatusCode"])
    if errors and errors[-1].code != exit_codes.FAILED:
        raise findings.error(errors[-1])
    if errors or code:
        failed = BuildError(f"{argv[0]} failed with exit code {code}")
        failed.finding = errors[-1] if errors else failed.finding
        raise failed


@contextmanager
def engine() -> Iterator[DockerClient | None]:
    """The Docker Engine that runs Apptainer; None if this machine's own Apptainer works, which root's does not."""
    root = os.geteuid() == 0
    if not process.apptainer():
        program, fix = "Apptainer", _INSTALL
    elif root:
        program = "Apptainer for root"
        fix = "run it as an ordinary user: Apptainer as root needs more rights than containers grant"
    else:
        yield None
        return
    builder_container.write_for_all()
    with closing(_docker(program, fix)) as client:
        yield client


def _docker(program: str, fix: str) -> DockerClient:
    """The Docker Engine that runs this program."""
    try:
        return docker.client()
    except UnfitError as error:
        raise UnfitError(
            f"this machine has no {program}, and no Docker Engine to run it in",
            found=error.problem,
            fix=f"{fix}\nor {error.finding.fix}",
        ) from error


def tool(
    argv: Sequence[str],
    *,
    binds: Mapping[Path, bool],
    env: Mapping[str, str] | None = None,
    seconds: float = _LONGEST_S,
    network: bool = False,
    on_line: Callable[[str], None] = lambda _: None,
) -> Done:
    """Run a program that reads images. `binds` has the paths in argv, and whether the program writes there.

    `on_line` takes the lines of the builder's own build, if it must be built first.

    Without `network` a container has none.
    """
    if process.which(argv[0]):
        return process.run(argv, env=env, check=False, seconds=seconds)
    with closing(_docker(argv[0], _INSTALL)) as client, docker.attempt(f"run {argv[0]} in a container"):
        tools = image(client, checkouts.root(), on_line)
        with _started(client, tools, argv, binds=binds, environment=env or {}, network=network, reads_images=True) as (
            running,
            outside,
        ):
            try:
                code = int(running.wait(timeout=seconds)["StatusCode"])
            except OSError as late:  # requests' own, which Docker's SDK lets through
                raise process.no_answer(argv, seconds) from late
            for path, writes in binds.items():
                if writes:
                    builder_container.take(path)
            out, err = (
                outside(running.logs(stdout=stdout, stderr=not stdout).decode(errors="replace"))
                for stdout in (True, False)
            )
    return Done(argv=tuple(argv), code=code, out=out, err=err)


@contextmanager
def _started(
    client: DockerClient,
    tools: str,
    argv: Sequence[str | Path],
    *,
    binds: Mapping[Path, bool],
    environment: Mapping[str, str],
    network: bool,
    reads_images: bool = False,
) -> Iterator[tuple[Container, Callable[[str], str]]]:
    """Run a program in the container, with other names for the paths: Apptainer cannot use a mount with a space.

    Also yields the function that puts this machine's paths into a text of the program's. Without /dev/fuse, Apptainer
    unpacks an image.
    """
    binds, environment = {**binds}, {**environment}
    if network:
        environment |= docker.proxies()
        if bundle := certificates():
            environment["SSL_CERT_FILE"] = str(bundle)
            binds[bundle] = False
    user = builder_container.reader() if reads_images else builder_container.caller()
    if user != builder_container.ROOT:
        for path, writes in binds.items():
            allow = builder_container.give if writes else builder_container.require_readable
            allow(path)
    # Three digits: no name begins with another one.
    inside = {str(path): f"/dray/{number}{path.suffix}" for number, path in enumerate(binds, 100)}
    outside = {name: path for path, name in inside.items()}
    host = client.api.create_host_config(
        mounts=[
            Mount(target=inside[str(path)], source=str(path), type="bind", read_only=not writes)
            for path, writes in binds.items()
        ],
        network_mode=builder_container.fetching() if network else "none",
        security_opt=[*builder_container.SECURITY],
        devices=[str(FUSE)] if reads_images and FUSE.exists() else [],
    )
    # systempaths=unconfined in Docker's own client: no user namespace may mount /proc where parts are masked.
    host |= {"MaskedPaths": [], "ReadonlyPaths": []}
    # An ordinary user's Podman says Rootless, Docker does not. There the caller is root inside, unless his id is kept.
    if client.info().get("Rootless"):
        host |= {"UsernsMode": "keep-id", "SecurityOpt": [*builder_container.SECURITY, "unmask=ALL"]}
    created = client.api.create_container(
        tools,
        [renamed(str(word), inside) for word in argv],
        name=f"dray-builder-{secrets.token_hex(4)}",
        environment={name: renamed(value, inside) for name, value in environment.items()},
        user="{}:{}".format(*user),
        host_config=host,
    )
    running = client.containers.get(created["Id"])
    try:
        running.start()
        yield running, lambda text: renamed(text, outside)
    finally:
        running.remove(force=True)


def image(client: DockerClient, checkout: Path, on_line: Callable[[str], None]) -> str:
    """The id of the image with Apptainer, which is built if it is missing. Only the build needs a base."""
    read = "".join(path.read_text() for path in _read(checkout))
    known = checkout / "build" / f"builder-{hashlib.sha256(read.encode()).hexdigest()[:16]}"
    with docker.attempt(f"look for {TAG}"), suppress(OSError, ImageNotFound):
        # By the id that this checkout has built: anybody's image can have the tag.
        return str(client.images.get(known.read_text()).id)
    on_line("dray: builder")
    base = docker.base_image(client, trixie(checkout), say=on_line)
    built = build(client, checkout, "builder", tag=TAG, base=base, on_line=on_line)
    known.parent.mkdir(exist_ok=True)
    write_atomic(known, built)
    return built


def build(
    client: DockerClient, checkout: Path, target: str, *, tag: str, base: str, on_line: Callable[[str], None]
) -> str:
    """Build the stage `builder`, or the cluster's `node`, of the Containerfile that they share; the image's id."""
    with TemporaryDirectory() as folder:
        lay_out(checkout, Path(folder))
        return docker.build(client, Path(folder), tag=tag, target=target, base=base, on_line=on_line)


def lay_out(checkout: Path, folder: Path) -> None:
    """Write what the Containerfile of the builder and of the cluster's machines copies."""
    for source in (*_read(checkout), checkout / "containers/cluster/machine.sh"):
        shutil.copyfile(source, folder / source.name)
    (folder / "mirrors.sed").write_text(mirrors.sed())
    bundle = certificates()
    (folder / "ca.crt").write_bytes(bundle.read_bytes() if bundle else b"")


def _read(checkout: Path) -> list[Path]:
    """All that decides what the builder has."""
    names = ("debian.sh", "cluster/Containerfile", "cluster/tools.sh", "cluster/tools.lock")
    return [checkout / "containers" / name for name in names]


def made_base(checkout: Path, suite: str) -> Path | None:
    """The base that containers/base/make-base.sh has made in build/base, if any."""
    tar = checkout / "build" / "base" / f"{suite}.tar"
    return tar if tar.is_file() else None


def trixie(checkout: Path) -> str:
    """The base of the builder and of `dray cluster`: DRAY_CLUSTER_BASE, the one that was made, or the pinned one."""
    pinned = re.findall(r"^ARG BASE=(\S+)$", (checkout / "containers/cluster/Containerfile").read_text(), re.MULTILINE)
    return os.environ.get("DRAY_CLUSTER_BASE") or str(made_base(checkout, "trixie") or pinned[0])


def certificates() -> Path | None:
    """The host's CA bundle: SSL_CERT_FILE, else where its own OpenSSL looks."""
    bundle = ssl.get_default_verify_paths().cafile
    named = os.environ.get("SSL_CERT_FILE")
    if named and not bundle:
        raise ConfigError(
            "the CA bundle does not exist", where="SSL_CERT_FILE", found=named, fix="correct it, or unset SSL_CERT_FILE"
        )
    return Path(bundle) if bundle else None
