"""What an image is made of: containers/<variant>/image.toml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dray.config.model import Spec

Variant = Literal["cpu", "cuda", "cuda12", "rocm"]
# Whose GPUs each variant drives.
ACCELERATORS: dict[str, str] = {"cpu": "cpu", "cuda": "cuda", "cuda12": "cuda", "rocm": "rocm"}
Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Vendor(Spec):
    """A wheel that the main registry has not got, or has in another build."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    """The package."""
    version: Annotated[str, Field(pattern=r"^[0-9][0-9a-z.+]*$")]
    """The version, with the vendor's own ending such as +rocm6.4."""
    sha256: list[Digest]
    """The hash of each of its files that may be installed."""
    index: Annotated[str, Field(pattern=r"^https://\S+$")]
    """The vendor's index, which errors name; it is asked only where pip's own configuration names it."""


class Image(Spec):
    """One variant of the image."""

    variant: Variant
    """Which GPUs, and which age of their drivers; also the name of its folder under containers/."""
    base: Annotated[str, Field(pattern=r"^\S+@sha256:[0-9a-f]{64}$")]
    """The image that it is built on, pinned by digest. `--base` puts another in its place for one build."""
    python: Annotated[str, Field(pattern=r"^3\.\d+$")]
    """Which of the base's Pythons runs everything, such as 3.11; the lock's wheels are for this one."""
    driver: Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")] | None = None
    """The oldest driver of the host that it runs with."""
    architectures: list[Annotated[str, Field(pattern=r"^(\d+\.\d+|gfx[0-9a-f]+)$")]] = Field(default_factory=list)
    """The GPUs that operators are compiled for, such as 8.0 or gfx90a."""
    vendor: list[Vendor] = Field(default_factory=list)
    """Wheels from elsewhere, with their hashes."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")], Line] = Field(default_factory=dict)
    """What this variant's processes find in their environment, besides containers/environment."""
    labels: dict[Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")], Line] = Field(default_factory=dict)
    """Labels that both the SIF and the Docker image carry."""

    @property
    def accelerator(self) -> str:
        """Whose GPUs the image drives."""
        return ACCELERATORS[self.variant]
