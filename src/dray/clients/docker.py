"""The Docker Engine through its SDK: reach it, have a base image, build from a Containerfile."""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
from docker.errors import BuildError, DockerException, ImageNotFound

from dray.clients import endpoint, progress, registry, sandbox
from dray.config import checkout, mirrors
from dray.contract.findings import ConfigError, DrayError

# One silent step of a build (an unpacking, a compile) may take this long before its next line.
_SILENCE_S = 1800
_LAST_LINES = 15
# The engine paints what a step writes on stderr.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def host() -> str:
    """The address at which the engine listens."""
    return endpoint.find(os.environ, checkout.home()).url


def client() -> docker.DockerClient:
    """A connection to the Docker Engine that has answered."""
    found = endpoint.find(os.environ, checkout.home())
    try:
        endpoint.knock(found)
        return docker.DockerClient(base_url=found.url, timeout=_SILENCE_S)
    except (DockerException, OSError) as error:
        raise endpoint.unreachable(found, error, os.environ) from error


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
    _pull(client, name, say)
    return name


def _how_to_make(tar: str) -> str:
    return f"make one: containers/base/make-base.sh trixie {tar}"


def _pull(client: docker.DockerClient, base: str, say: Callable[[str], None]) -> None:
    what = "the base of the builder and of the cluster"
    say(f"dray: pull {base}")
    try:
        problem = progress.pulled(client.api.pull(base, stream=True, decode=True), what, say=say)
    except (DockerException, OSError) as error:
        problem = str(getattr(error, "explanation", None) or error)
    if problem:
        raise registry.refused(what, base, problem, instead=f"or {_how_to_make('build/base/trixie.tar')}")


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
            buildargs={**_proxies(), **args},
            target=target or "",
            network_mode=sandbox.fetching(),
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


def _proxies() -> dict[str, str]:
    """Docker keeps these names out of the image and its history; programs disagree on the case."""
    names = ("http_proxy", "https_proxy", "no_proxy")
    return {name: os.environ[name] for lower in names for name in (lower, lower.upper()) if name in os.environ}
