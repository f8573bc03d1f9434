"""The Docker image, built by the Docker Engine from the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import docker

from dray import dockerd


def build(client: docker.DockerClient, *, inputs: Path, base: str, tag: str, on_line: Callable[[str], None]) -> str:
    """Build and tag the image; its id. A failed build leaves the tag where it was."""
    return dockerd.build(
        client,
        context=inputs,
        dockerfile="Containerfile",
        tag=tag,
        args={"BASE": dockerd.base_image(client, base.removeprefix("docker://"))},
        target=None,
        on_line=on_line,
    )
