"""Programs that need Apptainer or squashfs-tools: this machine's own, or those of the builder container."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from docker.errors import ImageNotFound
from docker.types import Mount

from dray import process
from dray.clients import apptainer, docker, sandbox
from dray.config import checkout as checkouts
from dray.config import mirrors
from dray.contract import exit_codes, findings
from dray.contract.files import write_atomic
from dray.contract.findings import ConfigError, DrayError, Finding, UnfitError
from dray.process import Done

if TYPE_CHECKING:
    from docker import DockerClient

TAG = "dray:builder"
_KEY = "dray.builder"
# The first word of argv for Apptainer, whatever its name on this machine.
APPTAINER = "apptainer"
_CONTEXT = Path("containers", "cluster")
_TOOLS = ("tools.sh", "tools.lock")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")


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
    """Run a program that needs Apptainer. `binds` has the paths in argv, and whether the program writes there.

    `saved` is the builder's image in a bundle. Without `network` the container has none; this machine's own Apptainer
    still has it, but gets no proxy.
    """
    errors: list[Finding] = []

    def read(line: str) -> None:
        finding = apptainer.from_line(line)
        errors.append(finding) if finding else on_line(line)

    with engine() as client:
        if client is None:
            programs = {"python3": sys.executable, APPTAINER: apptainer.program() or APPTAINER}
            unset = {} if network else {name: "" for lower in _PROXIES for name in (lower, lower.upper())}
            code = process.follow([programs.get(str(argv[0]), argv[0]), *argv[1:]], on_line=read, env=unset)
        else:
            tools = _loaded(client, saved) if saved and saved.exists() else image(client, checkout, on_line)
            code = _in_container(client, tools, checkout, argv, binds=binds, on_line=read, network=network)
    if errors and errors[-1].code != exit_codes.FAILED:
        raise findings.error(errors[-1])
    if errors or code != 0:
        failed = BuildError(f"{argv[0]} failed with exit code {code}")
        failed.finding = errors[-1] if errors else failed.finding
        raise failed


@contextmanager
def engine() -> Iterator[DockerClient | None]:
    """The Docker Engine that runs Apptainer; None if this machine's own Apptainer works."""
    tool = apptainer.program()
    if tool and os.geteuid() != 0:
        yield None
        return
    try:
        client = docker.client()
    except UnfitError as error:
        if tool:
            raise UnfitError(
                "Apptainer as root needs more rights than containers and shared machines grant",
                wanted=f"{tool} as an ordinary user, or a Docker Engine",
                found=f"{tool} as root; {error.problem}",
                fix="run the same command as an ordinary user",
            ) from error
        raise UnfitError(
            "this machine has no program that can build an image",
            wanted="Apptainer, or a Docker Engine to run it in",
            found=f"no apptainer on PATH; {error.problem}",
            fix=f"install apptainer (Debian: from sid; others: from its project's releases)\nor {error.finding.fix}",
        ) from error
    with closing(client):
        yield client


def tool(
    argv: Sequence[str],
    *,
    binds: Mapping[Path, bool],
    env: Mapping[str, str] | None = None,
    seconds: float | None = None,
    network: bool = False,
    on_line: Callable[[str], None] = lambda _: None,
) -> Done:
    """Run a program that reads images. `binds` has the paths in argv, and whether the program writes there.

    `on_line` takes the lines of the builder's own build, if it must be built first.

    Without `network` a container has none.
    """
    if process.which(argv[0]):
        return process.run(argv, env=env, check=False, seconds=seconds)
    try:
        client = docker.client()
    except UnfitError as error:
        raise UnfitError(
            f"this machine has no {argv[0]}, and no Docker Engine to run it in",
            found=error.problem,
            fix=f"install apptainer and squashfs-tools\nor {error.finding.fix}",
        ) from error
    with closing(client), docker.attempt(f"run {argv[0]} in a container"), ExitStack() as stack:
        tools = image(client, checkouts.root(), on_line)
        # Apptainer cannot use a mount whose path has a space.
        inside = {path: f"/dray/{number}{path.suffix}" for number, path in enumerate(binds) if " " in str(path)}
        build = checkouts.root() / "build"
        build.mkdir(exist_ok=True)
        lent = Path(stack.enter_context(TemporaryDirectory(prefix=".readable-", dir=build)))
        user = sandbox.looker()
        names = {path: inside.get(path, str(path)) for path in binds}
        mounts = [*_mounts(names, binds, lent)] if user[0] else [*_plain(names, binds)]
        environment = {name: sandbox.renamed(value, inside) for name, value in (env or {}).items()}
        if network:
            mounts, environment = [*mounts, *_certificate(environment)], {**proxies(os.environ), **environment}
        with sandbox.started(
            client,
            tools,
            [sandbox.renamed(word, inside) for word in argv],
            mounts=mounts,
            environment=environment,
            network=network,
            user=user,
            fuse=True,
        ) as running:
            try:
                code = int(running.wait(timeout=seconds)["StatusCode"])
            except OSError as late:  # requests' own, which Docker's SDK lets through
                if seconds is None:
                    raise
                raise process.no_answer(argv, seconds) from late
            for path in (path for path, writes in binds.items() if writes and user[0]):
                sandbox.take(path)
            out, err = (
                sandbox.named(running.logs(stdout=out, stderr=not out).decode(errors="replace"), inside)
                for out in (True, False)
            )
    return Done(argv=tuple(argv), code=code, out=out, err=err)


def _in_container(
    client: DockerClient,
    tools: str,
    checkout: Path,
    argv: Sequence[str | Path],
    *,
    binds: Mapping[Path, bool],
    on_line: Callable[[str], None],
    network: bool,
) -> int:
    """Mount the paths under other names: Apptainer cannot use a mount whose path has a space."""
    inside = {path: f"/dray/{number}{path.suffix}" for number, path in enumerate(binds)}
    environment = {"PYTHONPATH": "/dray/src", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    certificate = _certificate(environment) if network else []
    environment |= proxies(os.environ) if network else {}
    build = checkout / "build"
    build.mkdir(exist_ok=True)
    with (
        docker.attempt("build in a container"),
        TemporaryDirectory(prefix=".readable-", dir=build) as lent,
        sandbox.started(
            client,
            tools,
            [sandbox.mapped(word, inside) for word in argv],
            mounts=[*_mounts({checkout / "src": "/dray/src", **inside}, binds, Path(lent)), *certificate],
            environment=environment,
            network=network,
        ) as running,
    ):
        for line in sandbox.lines(running.logs(stream=True)):
            on_line(sandbox.named(line, inside))
        return int(running.wait()["StatusCode"])


def _certificate(environment: dict[str, str]) -> list[Mount]:
    """The mount of the host's CA bundle; the environment names it."""
    bundle = certificates()
    if not bundle:
        return []
    environment["SSL_CERT_FILE"] = str(bundle)
    return [sandbox.bind(bundle)]


def _plain(inside: Mapping[Path, str], binds: Mapping[Path, bool]) -> Iterator[Mount]:
    for path, target in inside.items():
        yield Mount(target=target, source=str(path), type="bind", read_only=not binds[path])


def _mounts(inside: Mapping[Path, str], binds: Mapping[Path, bool], lent: Path) -> Iterator[Mount]:
    """The mounts; the ordinary user can read all of them."""
    for path, target in inside.items():
        writes = binds.get(path, False)
        if writes:
            sandbox.give(path)
        source = path if writes else sandbox.readable(path, lent)
        yield Mount(target=target, source=str(source), type="bind", read_only=not writes)


def shell(rootfs: Path, *, binds: Mapping[Path, str]) -> list[str]:
    """The command that opens a shell in a root filesystem, as the root that its steps had."""
    options = ["shell", "--writable", "--fakeroot", "--no-home"]
    options += [word for path, target in binds.items() for word in ("--bind", f"{path}:{target}")]
    with engine() as client:
        if client is None:
            return [process.which(apptainer.program() or "") or "apptainer", *options, str(rootfs)]
    command = process.which("docker")
    if not command:
        raise UnfitError("a shell needs Docker's command line client", where=rootfs, fix="install it")
    volumes = [word for path in (rootfs, *binds) for word in ("--volume", f"{path}:{path}")]
    docker_options = [
        word for name in (*sandbox.SECURITY, "systempaths=unconfined") for word in ("--security-opt", name)
    ]
    docker_options += ["--user", ":".join(map(str, sandbox.caller())), *volumes]
    return [command, "run", "--rm", "--interactive", "--tty", *docker_options, TAG, "apptainer", *options, str(rootfs)]


def image(client: DockerClient, checkout: Path, on_line: Callable[[str], None]) -> str:
    """The id of the image with Apptainer, which is built if it is missing. Only the build needs a base."""
    read = "".join(path.read_text() for path in _read(checkout))
    key = hashlib.sha256(read.encode()).hexdigest()
    known = checkout / "build" / f"builder-{key[:16]}"
    with docker.attempt(f"look for {TAG}"), suppress(OSError, ImageNotFound):
        # By the id that this checkout has built: anybody's image can have the label or the tag.
        return str(client.images.get(known.read_text().strip()).id)
    on_line("dray: builder")
    base = docker.base_image(client, trixie(checkout), say=on_line)
    with context(checkout) as folder:
        built = docker.build(
            client,
            context=folder,
            dockerfile="Containerfile",
            tag=TAG,
            args={"BASE": base, "KEY": key},
            target="builder",
            on_line=on_line,
        )
    write_atomic(known, built)
    return built


def _read(checkout: Path) -> list[Path]:
    """All that decides what the builder has."""
    containers = checkout / "containers"
    return [containers / "debian.sh", *(containers / "cluster" / name for name in ("Containerfile", *_TOOLS))]


@contextmanager
def context(checkout: Path) -> Iterator[Path]:
    """The folder that the Containerfile of the builder and of the cluster's machines is built from."""
    build = checkout / "build"
    build.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix=".context-", dir=build) as made:
        folder = Path(made)
        for source in (*_read(checkout), checkout / _CONTEXT / "machine.sh"):
            shutil.copyfile(source, folder / source.name)
        (folder / "mirrors.sed").write_text(mirrors.sed())
        bundle = certificates()
        (folder / "ca.crt").write_bytes(bundle.read_bytes() if bundle else b"")
        yield folder


def _loaded(client: DockerClient, saved: Path) -> str:
    with docker.attempt(f"load {saved}"), saved.open("rb") as file:
        return str(client.images.load(file)[0].id)


def made_base(checkout: Path, suite: str) -> Path | None:
    """The base that containers/base/make-base.sh has made in build/base, if any."""
    tar = checkout / "build" / "base" / f"{suite}.tar"
    return tar if tar.is_file() else None


def trixie(checkout: Path) -> str:
    """The base of the builder and of `dray cluster`: DRAY_CLUSTER_BASE, the one that was made, or the pinned one."""
    pinned = re.findall(r"^ARG BASE=(\S+)$", (checkout / _CONTEXT / "Containerfile").read_text(), re.MULTILINE)
    return os.environ.get("DRAY_CLUSTER_BASE") or str(made_base(checkout, "trixie") or pinned[0])


def proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """The host's proxies under the lower-case names, the only ones that apt reads."""
    found = {name: environment.get(name) or environment.get(name.upper()) for name in _PROXIES}
    return {name: value for name, value in found.items() if value}


def certificates() -> Path | None:
    """The host's CA bundle: SSL_CERT_FILE, else where its own OpenSSL looks."""
    named = os.environ.get("SSL_CERT_FILE")
    if named and not Path(named).is_file():
        raise ConfigError(
            "the CA bundle does not exist", where="SSL_CERT_FILE", found=named, fix="correct it, or unset SSL_CERT_FILE"
        )
    found = ssl.get_default_verify_paths().cafile
    return Path(found) if found else None
