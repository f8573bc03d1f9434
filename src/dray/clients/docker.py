"""The Docker Engine through its SDK: find and reach it, have a base image, build from a Containerfile."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import docker
from docker.context import ContextAPI
from docker.context.config import get_current_context_name
from docker.errors import BuildError, DockerException, ImageNotFound

from dray.clients import builder_container, registry
from dray.config import mirrors
from dray.contract.findings import ConfigError, DrayError, UnfitError

_ANSWER_S = 2.0
# One silent step of a build (an unpacking, a compile) may take this long before its next line.
_SILENCE_S = 1800
_LAST_LINES = 15
# The engine paints what a step writes on stderr.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")
# Who listens on a socket of this path, and what starts it.
_SERVICES = (
    (
        r"/\.docker/(desktop|run)/",
        "Docker Desktop",
        "start Docker Desktop (on Linux: systemctl --user start docker-desktop)",
    ),
    (r"/\.?colima/", "colima", "colima start"),
    (r"podman.machine|/podman/.*-api\.sock", "the Podman machine", "podman machine start"),
    (r"^(/var)?/run/podman/", "Podman's service", "sudo systemctl start podman.socket"),
    (r"/podman/podman\.sock", "Podman's service", "systemctl --user start podman.socket"),
    (r"^(/var)?/run/user/\d+/docker\.sock", "the rootless Docker Engine", "systemctl --user start docker"),
)


class Endpoint(NamedTuple):
    """Where the engine listens, and what named it: DOCKER_HOST or a context."""

    url: str
    source: str

    @property
    def socket(self) -> str:
        """The path of its socket."""
        return self.url.removeprefix("unix://")

    def __str__(self) -> str:
        return f"{self.url} ({self.source})"


def endpoint() -> Endpoint:
    """The endpoint that Docker's own client would take. Refuses one that is not a socket of this machine."""
    chosen = Endpoint(os.environ.get("DOCKER_HOST", ""), "DOCKER_HOST")
    fix = "unset DOCKER_HOST"
    if not chosen.url:
        name = os.environ.get("DOCKER_CONTEXT") or get_current_context_name()
        context = ContextAPI.get_context(name)
        fix = "docker context ls shows those that exist; docker context use default"
        if not context:
            raise ConfigError(f"the Docker context {name} does not exist", fix=fix)
        chosen = Endpoint(context.Host or "", f"context {name}")
    if not chosen.url.startswith("unix://"):
        raise ConfigError(
            "dray needs a Docker Engine on this machine, whose folders it binds",
            where=chosen.source,
            wanted="a socket, such as unix:///var/run/docker.sock",
            found=chosen.url,
            fix=fix,
        )
    return chosen


def client() -> docker.DockerClient:
    """A connection to the Docker Engine that has answered."""
    chosen = endpoint()
    try:
        _knock(chosen)
        return docker.DockerClient(base_url=chosen.url, timeout=_SILENCE_S)
    except (DockerException, OSError) as error:
        raise unreachable(chosen, error) from error


def _knock(chosen: Endpoint) -> None:
    """Connect once, and raise the reason if that fails: the SDK hides it in a text, and leaves its socket open."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(_ANSWER_S)
        door.connect(chosen.socket)


def unreachable(chosen: Endpoint, error: Exception) -> UnfitError:
    """The error of an engine that does not answer, by the service that should listen there."""
    services = [(service, start) for path, service, start in _SERVICES if re.search(path, chosen.socket)]
    service, start = services[0] if services else ("the Docker Engine", "")
    if isinstance(error, PermissionError):
        problem = f"{service} refuses this user"
        fix = f"use an engine of your own: docker context use default; ls -l {chosen.socket} shows its owner"
        if not start:
            fix = "add yourself to the docker group (sudo usermod -aG docker $USER) and log in again"
    elif start:
        problem, fix = f"{service} is not running", start
    elif isinstance(error, FileNotFoundError):
        problem = "no Docker Engine runs on this machine"
        fix = "install Docker Engine and start it, or set DOCKER_HOST"
    else:
        problem = "the Docker Engine does not answer"
        fix = "start it (sudo systemctl start docker), or set DOCKER_HOST to one that runs"
    # A user's own engines, which Docker's client takes only when it is told.
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"))
    others = [path for path in (folder / "docker.sock", folder / "podman/podman.sock") if path.exists()]
    if chosen.source == "context default":
        fix = "\nor ".join([fix, *(f"export DOCKER_HOST=unix://{path}" for path in others)])
    return UnfitError(problem, where=chosen, found=error, fix=fix)


@contextmanager
def attempt(what: str, *, fix: str | None = None) -> Iterator[None]:
    """Turn whatever the SDK raises while `what` is done into an error that a user can act on."""
    try:
        yield
    except BrokenPipeError:  # the reader of dray's own output has ended, not Docker
        raise
    except (DockerException, OSError) as error:
        raise DrayError(f"Docker failed to {what}", found=_reason(error), fix=fix) from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error)


def base_image(client: docker.DockerClient, base: str, *, say: Callable[[str], None]) -> str:
    """A local image reference for `base`: an image reference, or the path of a rootfs tar."""
    path = Path(base).expanduser()
    if path.is_file():
        return _imported(client, path)
    if base.startswith(("/", ".", "~")) or ".tar" in path.suffixes:
        raise ConfigError("the tar of the base does not exist", found=base, fix=_how_to_make(base))
    for name in (base, mirrors.image(base)):
        with attempt(f"look for the image {name}"), suppress(ImageNotFound):
            client.images.get(name)
            return name
    _pull(client, name, say)
    return name


def _how_to_make(tar: str) -> str:
    return f"make one: containers/base/make-base.sh trixie {tar}"


def _pull(client: docker.DockerClient, base: str, say: Callable[[str], None]) -> None:
    say(f"dray: pull {base}")
    problem = ""
    try:
        for answer in client.api.pull(base, stream=True, decode=True):
            problem = answer.get("error") or problem
    except (DockerException, OSError) as error:
        problem = _reason(error)
    if problem:
        instead = f"or {_how_to_make('build/base/trixie.tar')}"
        raise registry.refused("the base of the builder and of the cluster", base, problem, instead=instead)


def _imported(client: docker.DockerClient, rootfs: Path) -> str:
    """The tag is the content's digest, so that the same tar is imported once."""
    with rootfs.open("rb") as tar:
        digest = hashlib.file_digest(tar, "sha256").hexdigest()
    reference = f"dray-base:{digest[:16]}"
    with attempt(f"import {rootfs}", fix=_how_to_make(str(rootfs))):
        try:
            client.images.get(reference)
        except ImageNotFound:
            client.api.import_image(src=str(rootfs), repository="dray-base", tag=digest[:16])
            client.images.get(reference)
    return reference


def proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """The host's proxies under the names of both cases: programs disagree on the case, and apt reads the lower one.

    Docker keeps these names out of an image and its history.
    """
    lower = {name.lower(): value for name, value in environment.items() if name.lower() in _PROXIES}
    return lower | {name.upper(): value for name, value in lower.items()}


def build(
    client: docker.DockerClient,
    *,
    context: Path,
    dockerfile: str,
    tag: str,
    args: Mapping[str, str],
    target: str | None,
    on_line: Callable[[str], None],
) -> str:
    """Build an image, each line of the build's output going to `on_line`; the image's id."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with attempt(f"build {tag}"):
        answers = client.api.build(
            path=str(context),
            dockerfile=dockerfile,
            tag=tag,
            buildargs={**proxies(os.environ), **args},
            target=target or "",
            network_mode=builder_container.fetching(),
            rm=True,
            forcerm=True,
            decode=True,
        )
        try:
            for line in _lines(answers):
                last.append(line)
                on_line(line)
        except BuildError as error:
            raise DrayError(
                f"building {tag} failed: {error.msg}",
                where=context / dockerfile,
                found="\n".join(last) or None,
            ) from error
        return str(client.images.get(tag).id)


def _lines(answers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Whole lines: the engine cuts its output wherever a write ended."""
    rest = problem = ""
    for answer in answers:  # to the end, also after a failure: the SDK closes only what was read whole
        *whole, rest = (rest + _COLOUR.sub("", answer.get("stream", ""))).split("\n")
        yield from (line.rstrip("\r") for line in whole if line.strip())
        problem = problem or answer.get("error", "")
    if rest.strip():
        yield rest
    if problem:
        raise BuildError(problem, iter(()))
