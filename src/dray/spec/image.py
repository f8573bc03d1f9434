"""What an image is made of: containers/<variant>/image.toml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dray.spec.model import Spec

Label = Annotated[str, Field(pattern=r"^[^\r\n]+$")]


class Image(Spec):
    """One variant of the image."""

    variant: Literal["cpu", "cuda", "rocm"]
    """Whose GPUs the image is for; also the name of its folder under containers/."""
    base: Annotated[str, Field(pattern=r"^\S+@sha256:[0-9a-f]{64}$")]
    """The image that it is built on, pinned by digest. `--base` puts another in its place for one build."""
    python: Annotated[str, Field(pattern=r"^3\.\d+$")]
    """Which of the base's Pythons runs everything, such as 3.11; the lock's wheels are for this one."""
    labels: dict[Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")], Label] = Field(default_factory=dict)
    """Labels that both the SIF and the Docker image carry."""
