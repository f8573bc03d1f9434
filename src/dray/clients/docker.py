"""The Docker Engine through its SDK: find and reach it, have a base image, build from a Containerfile."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.request import getproxies_environment

import docker
from docker.context import ContextAPI
from docker.context.config import get_current_context_name
from docker.errors import DockerException, ImageNotFound
from docker.utils.json_stream import split_buffer

from dray.clients import builder_container, pull_errors
from dray.config import mirrors
from dray.contract.findings import ConfigError, DrayError, UnfitError

_ANSWER_S = 2.0
# One silent step of a build (an unpacking, a compile) may take this long before its next line.
_SILENCE_S = 1800
_LAST_LINES = 15
# The engine paints what a step writes on stderr.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Why nobody answers on a socket of this path, and what helps: the first that fits.
_REFUSALS = (
    (
        r"/\.docker/|/\.?colima/|podman|/run/user/",
        PermissionError,
        "the engine refuses this user",
        "use an engine of your own: docker context use default; ls -l {} shows its owner",
    ),
    (
        "",
        PermissionError,
        "the Docker Engine refuses this user",
        "add yourself to the docker group (sudo usermod -aG docker $USER) and log in again",
    ),
    (
        r"/\.docker/(desktop|run)/",
        Exception,
        "Docker Desktop is not running",
        "start Docker Desktop (on Linux: systemctl --user start docker-desktop)",
    ),
    (r"/\.?colima/", Exception, "colima is not running", "colima start"),
    (
        r"podman.machine|/podman/.*-api\.sock",
        Exception,
        "the Podman machine is not running",
        "podman machine start",
    ),
    (
        r"^(/var)?/run/podman/",
        Exception,
        "Podman's service is not running",
        "sudo systemctl start podman.socket",
    ),
    (
        r"/podman/podman\.sock",
        Exception,
        "Podman's service is not running",
        "systemctl --user start podman.socket",
    ),
    (
        r"^(/var)?/run/user/\d+/docker\.sock",
        Exception,
        "the rootless Docker Engine is not running",
        "systemctl --user start docker",
    ),
    (
        "",
        FileNotFoundError,
        "no Docker Engine runs on this machine",
        "install Docker Engine and start it, or set DOCKER_HOST",
    ),
    (
        "",
        Exception,
        "the Docker Engine does not answer",
        "start it (sudo systemctl start docker), or set DOCKER_HOST to one that runs",
    ),
)


class Endpoint(NamedTuple):
    """Where the engine listens, and what named it: DOCKER_HOST or a context."""

    url: str
    source: str

    def __str__(self) -> str:
        return f"{self.url} ({self.source})"


def endpoint() -> Endpoint:
    """The endpoint that Docker's own client would take. Refuses one that is not a socket of this machine."""
    if url := os.environ.get("DOCKER_HOST"):
        chosen, fix = Endpoint(url, "DOCKER_HOST"), "unset DOCKER_HOST"
    else:
        name = os.environ.get("DOCKER_CONTEXT") or get_current_context_name() or "default"
        fix = "docker context ls shows those that exist; docker context use default"
        try:
            context = ContextAPI.get_context(name)
        except Exception as damaged:  # the SDK's own, of a file that it cannot read
            raise ConfigError(f"the Docker context {name} cannot be read", found=damaged, fix=fix) from damaged
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
        door.connect(chosen.url.removeprefix("unix://"))


def unreachable(chosen: Endpoint, error: Exception) -> UnfitError:
    """The error of an engine that does not answer, by the service that should listen there."""
    path = chosen.url.removeprefix("unix://")
    problem, fix = next(
        (problem, fix.format(path))
        for pattern, kind, problem, fix in _REFUSALS
        if isinstance(error, kind) and re.search(pattern, path)
    )
    # A user's own engines, which Docker's client takes only when it is told.
    for name in ("docker.sock", "podman/podman.sock"):
        other = Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), name)
        if chosen.source == "context default" and other.exists():
            fix += f"\nor export DOCKER_HOST=unix://{other}"
    return UnfitError(problem, where=chosen, found=error, fix=fix)


@contextmanager
def attempt(what: str, *, fix: str | None = None) -> Iterator[None]:
    """Turn whatever the SDK raises while `what` is done into an error that a user can act on."""
    try:
        yield
    except BrokenPipeError:  # the reader of dray's own output has ended, not Docker
        raise
    except (DockerException, OSError) as error:
        reason = getattr(error, "explanation", None) or error
        raise DrayError(f"Docker failed to {what}", found=reason, fix=fix) from error


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
    say(f"dray: pull {name}")
    try:
        with attempt(f"pull {name}"):
            for answer in [*client.api.pull(name, stream=True, decode=True)]:  # read to the end, the SDK closes it
                if "error" in answer:
                    raise DockerException(answer["error"])
    except DrayError as error:
        raise pull_errors.refused(
            "the base of the builder and of the cluster",
            name,
            error.finding.found,
            instead=f"or {_how_to_make('build/base/trixie.tar')}",
        ) from error
    return name


def _how_to_make(tar: str) -> str:
    return f"make one: containers/base/make-base.sh trixie {tar}"


def _imported(client: docker.DockerClient, rootfs: Path) -> str:
    """The tag is the content's digest, so that the same tar is imported once."""
    with rootfs.open("rb") as tar:
        digest = hashlib.file_digest(tar, "sha256").hexdigest()
    reference = f"dray-base:{digest[:16]}"
    with attempt(f"import {rootfs}", fix=_how_to_make(str(rootfs))):
        try:
            client.images.get(reference)
        except ImageNotFound:
            client.api.import_image(src=str(rootfs), repository=reference)
            client.images.get(reference)
    return reference


def proxies() -> dict[str, str]:
    """The host's proxies under the names of both cases: programs disagree on the case, and apt reads the lower one.

    Docker keeps these names out of an image and its history.
    """
    given = getproxies_environment()
    schemes = given.keys() & {"http", "https", "no"}
    return {case(f"{scheme}_proxy"): given[scheme] for scheme in schemes for case in (str.lower, str.upper)}


def build(
    client: docker.DockerClient,
    folder: Path,
    *,
    tag: str,
    target: str,
    base: str,
    on_line: Callable[[str], None],
) -> str:
    """Build a stage of the folder's Containerfile, each line of the output going to `on_line`; the image's id."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    problems: list[str] = []
    with attempt(f"build {tag}"):
        answers = client.api.build(
            path=str(folder),
            dockerfile="Containerfile",
            tag=tag,
            buildargs={**proxies(), "BASE": base},
            target=target,
            network_mode=builder_container.fetching(),
            rm=True,
            forcerm=True,
            decode=True,
        )

        def output() -> Iterator[str]:
            for answer in answers:  # to the end, also after a failure: the SDK closes only what was read whole
                if "error" in answer:
                    problems.append(answer["error"])
                yield _COLOUR.sub("", answer.get("stream", ""))

        for line in split_buffer(output()):
            if line.strip():
                last.append(line.rstrip("\r\n"))
                on_line(last[-1])
        if problems:
            raise DrayError(f"building {tag} failed: {problems[0]}", found="\n".join(last))
        return str(client.images.get(tag).id)
