"""Build a variant's image in one of its formats, by whichever way this machine has."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException

from dray import dockerd
from dray.errors import UnfitError
from dray.images import builder, inputs, oci, place, sif
from dray.images.log import BuildLog


@dataclass(frozen=True, kw_only=True)
class Built:
    """An image that is there."""

    name: str
    size: int
    digest: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}  {self.size / 1e6:.0f} MB  {self.digest}  ({self.seconds:.0f} s)"


def as_sif(checkout: Path, variant: str, *, base: str | None = None, out: Path | None = None) -> Built:
    """By Apptainer here, or by Apptainer in a container."""
    started = time.monotonic()
    image = inputs.image(checkout, variant)
    out = (out or place.sif(checkout, variant)).absolute()
    where = base or image.base
    sif.local_base(where)
    client = _docker_for_sif()
    with BuildLog(checkout / "build" / "logs" / f"{variant}-sif.log") as log, log.explaining():
        folder = inputs.gather(checkout, image, say=log.line)
        with sif.replacing(out) as scratch:
            if client is None:
                sif.build(inputs=folder, base=where, scratch=scratch, on_line=log.line)
            else:
                builder.build(client, checkout=checkout, inputs=folder, base=where, scratch=scratch, on_line=log.line)
    with out.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Built(name=str(out), size=out.stat().st_size, digest=f"sha256:{digest}", seconds=time.monotonic() - started)


def as_docker(checkout: Path, variant: str, *, base: str | None = None) -> Built:
    """By the Docker Engine."""
    started = time.monotonic()
    image = inputs.image(checkout, variant)
    client = dockerd.client()
    tag = place.docker_tag(variant)
    before = {str(found.id) for found in client.images.list(tag)}
    with BuildLog(checkout / "build" / "logs" / f"{variant}-docker.log") as log, log.explaining():
        folder = inputs.gather(checkout, image, say=log.line)
        digest = oci.build(client, inputs=folder, base=base or image.base, tag=tag, on_line=log.line)
    for old in before - {digest}:
        # Over a gigabyte that nobody can name any more, unless a container or another tag still holds it.
        with suppress(DockerException):
            client.images.remove(old)
    size = int(client.images.get(digest).attrs["Size"])
    return Built(name=tag, size=size, digest=digest, seconds=time.monotonic() - started)


def _docker_for_sif() -> docker.DockerClient | None:
    """None: Apptainer works right here."""
    tool = sif.apptainer()
    if tool and os.geteuid() != 0:
        return None
    try:
        return dockerd.client()
    except UnfitError as error:
        if tool:
            raise UnfitError(
                "root's own Apptainer builds need more rights than containers and shared machines grant",
                wanted=f"{tool} as an ordinary user, or a Docker Engine",
                found=f"{tool} as root; {error.problem}",
                fix="run the same command as an ordinary user",
            ) from error
        raise UnfitError(
            "nothing here can build a SIF",
            wanted="Apptainer, or a Docker Engine to run it in",
            found=f"no apptainer on PATH; {error.problem}",
            fix="install apptainer (Debian: from sid; elsewhere: from its project's releases), or docker.io",
        ) from error
