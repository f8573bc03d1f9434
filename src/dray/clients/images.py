"""Images in Docker and in Podman: find one by its tag, load one from its archive."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from docker.errors import DockerException

from dray import process
from dray.clients import docker
from dray.contract.findings import UnfitError


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """An image that an engine has."""

    id: str
    size: int
    labels: Mapping[str, str]


def engines(formats: Sequence[str]) -> list[str]:
    """The engines among the formats of a build."""
    return [one for one in formats if one in ("docker", "podman")]


def find(engine: str, tag: str) -> ImageInfo | None:
    """The engine's image with this tag, if any."""
    if engine == "podman":
        _require_podman()
        done = process.run(["podman", "image", "inspect", f"localhost/{tag}"], check=False)
        if done.code != 0:
            return None
        (found,) = json.loads(done.out)
        return ImageInfo(id=f"sha256:{found['Id']}", size=int(found["Size"]), labels=found["Labels"] or {})
    with closing(docker.client()) as client, docker.attempt(f"look for {tag}"):
        images = client.images.list(tag)
    if not images:
        return None
    return ImageInfo(id=str(images[0].id), size=int(images[0].attrs["Size"]), labels=images[0].labels)


def load(engine: str, archive: Path, tag: str) -> None:
    """Load an archive into an engine. The image that had this tag is removed, unless something still uses it."""
    before = find(engine, tag)
    if engine == "podman":
        process.run(["podman", "load", "--quiet", "--input", archive])
        now = find(engine, tag)
        if before and now and before.id != now.id:
            process.run(["podman", "rmi", before.id.removeprefix("sha256:")], check=False)
        return
    with closing(docker.client()) as client, docker.attempt(f"load {tag}"):
        with archive.open("rb") as file:
            client.images.load(file)
        if before and before.id != client.images.get(tag).id:
            # More than a gigabyte without a tag, unless a container or another tag still uses it.
            with suppress(DockerException):
                client.images.remove(before.id)


def _require_podman() -> None:
    if not process.which("podman"):
        raise UnfitError("podman is not on this machine", fix="install podman, or choose another engine or format")
