"""Images in Docker and in Podman, by their commands, which are the same: find one by its tag, load an archive."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dray import process
from dray.clients import docker


class ImageInfo(NamedTuple):
    """An image that an engine has."""

    id: str
    size: int
    labels: Mapping[str, str]


def engines(formats: Sequence[str]) -> list[str]:
    """The engines among the formats of a build."""
    return [name for name in formats if name in ("docker", "podman")]


def find(engine: str, tag: str) -> ImageInfo | None:
    """The engine's image with this tag, if any."""
    if engine == "docker":
        docker.client().close()  # its error says why Docker does not answer
    ids = process.run([engine, "image", "ls", "--quiet", "--no-trunc", tag]).out.split()
    if not ids:
        return None
    (image,) = json.loads(process.run([engine, "image", "inspect", ids[0]]).out)
    return ImageInfo(id=ids[0], size=image["Size"], labels=image["Config"].get("Labels") or {})


def load(engine: str, archive: Path, tag: str) -> None:
    """Load an archive into an engine. The image that had this tag is removed, unless something still uses it."""
    before = find(engine, tag)
    process.run([engine, "load", "--quiet", "--input", archive])
    now = find(engine, tag)
    if before and now and before.id != now.id:  # more than a gigabyte without a tag
        process.run([engine, "rmi", before.id], check=False)
