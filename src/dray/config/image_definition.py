"""The definition of an image: containers/<variant>/image.toml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dray.config.load_toml import Spec

Variant = Literal["cpu", "cuda", "cuda12", "rocm", "rocm6"]
# The GPUs of each variant.
ACCELERATORS: dict[str, str] = {"cpu": "cpu", "cuda": "cuda", "cuda12": "cuda", "rocm": "rocm", "rocm6": "rocm"}
# NCCL's and RCCL's plugin for libfabric, where containers/steps/56-fabric.sh puts it.
PLUGIN = "/opt/dray/fabric/libnccl-net-ofi.so"
# The name of an adopted image, which a variant's own must not be.
ADOPTED = r"^[a-z0-9][a-z0-9_-]{0,62}$"
# Or the SIF itself.
ADOPTED_OR_FILE = r"^([a-z0-9][a-z0-9_-]{0,62}|/[^\x00-\x1f\x7f]+)$"
Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9A-F]{40}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Vendor(Spec):
    """A wheel that the main registry lacks, or has in another build."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    """The package."""
    version: Annotated[str, Field(pattern=r"^[0-9][0-9a-z.+]*$")]
    """The version, with the vendor's own ending such as +rocm6.4."""
    sha256: list[Digest]
    """The hashes of the files that may be installed."""
    index: Annotated[str, Field(pattern=r"^https://\S+$")]
    """The vendor's index, asked for this package only, and only if the user's own pip does not find it."""


class SourceArchive(Spec):
    """Sources that a step of the build compiles: a release's tar, fetched and pinned by hash."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    """The program's name, as in the tar's only folder NAME-VERSION."""
    version: Annotated[str, Field(pattern=r"^[0-9][0-9a-z.]*$")]
    """The release."""
    sha256: Digest
    """The hash of the uncompressed tar: the compression may change between downloads."""
    url: Annotated[str, Field(pattern=r"^https://\S+\.tar\.gz$")]
    """The release's .tar.gz; fetched unless the folder of --wheels has it."""
    license: Annotated[str, Field(pattern=r"^[A-Za-z0-9.+() -]+$")]
    """Its licence as an SPDX expression, for the bill of materials."""

    @property
    def file(self) -> str:
        """The tar's file name."""
        return f"{self.name}-{self.version}.tar"


class Size(Spec):
    """How much a build downloads and writes, in MB of 1,000,000 bytes: dray refuses a build without that free space."""

    wheels_mb: NonNegativeInt
    """The locked wheels for x86_64, as build/inputs/VARIANT/wheels has them after a build."""
    unpacked_mb: PositiveInt
    """All files of the image."""
    sif_mb: PositiveInt
    """The SIF."""


class Image(Spec):
    """One variant of the image."""

    variant: Variant
    """The GPUs and the age of their drivers; also the name of its folder under containers/."""
    base: Annotated[str, Field(pattern=r"^\S+@sha256:[0-9a-f]{64}$")]
    """The base image, pinned by digest. `--base` replaces it for one build."""
    python: Annotated[str, Field(pattern=r"^3\.\d+$")]
    """The base's Python, such as 3.11, which the lock's wheels are for."""
    machines: list[Literal["x86_64", "aarch64"]] = ["x86_64"]
    """The architectures that its wheels are for, as uname -m names them."""
    size: Size | None = None
    """The disk space that a build needs. Measure it after the first build; without it dray checks no disk."""
    driver: Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")] | None = None
    """The oldest host driver that it runs with."""
    architectures: list[Annotated[str, Field(pattern=r"^(\d+\.\d+|gfx[0-9a-f]+)$")]] = []
    """The GPUs that operators are compiled for, such as 8.0 or gfx90a."""
    vendor: list[Vendor] = []
    """Wheels of other indexes, with their hashes."""
    source: list[SourceArchive] = []
    """Sources that the build compiles, with their hashes."""
    without: list[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]] = []
    """Packages of Debian's locks that this variant does not install."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")], Line] = {}
    """Environment variables of this variant, added to containers/environment."""
    labels: dict[Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")], Line] = {}
    """Labels of both the SIF and the Docker image."""

    @property
    def accelerator(self) -> str:
        """The GPUs that the image is for."""
        return ACCELERATORS[self.variant]
