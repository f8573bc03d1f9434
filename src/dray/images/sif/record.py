"""The record of a built image or layer, in a file beside it: dray-cpu.sif has dray-cpu.sif.json."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, ValidationError

from dray.config.image_definition import Digest
from dray.config.load_toml import Spec, explained
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.images.fetch import sha256


class File(Spec):
    """The SIF file."""

    sha256: Digest
    """Digest of the whole file; a signature changes it."""
    size: int
    """Bytes."""

    @classmethod
    def of(cls, path: Path) -> File:
        """The digest and size of a file."""
        return cls(sha256=sha256(path), size=path.stat().st_size)


class Record(Spec):
    """How an image or a layer was built."""

    variant: str
    """The image's variant."""
    dray: str
    """The version of dray in it."""
    base: str
    """The base image, or the digest of its tar; for a layer, the image that it was made for."""
    inputs: Digest
    """Digest of all inputs of the build."""
    epoch: int
    """The time of all its files, in seconds since 1970."""
    tools: dict[str, str]
    """Versions of the tools that built it: apptainer, mksquashfs."""
    sif: File
    python: str = ""
    """For a layer: the Python that its modules are compiled for."""
    needs: dict[str, str] = Field(default_factory=dict)
    """For a layer: the image's packages that it depends on, in the versions that it was locked for."""
    packages: dict[str, str] = Field(default_factory=dict)
    """For a layer: the packages that it adds."""
    signed: str | None = None
    """Fingerprint of the key that signed the SIF."""


def path_for(sif: Path) -> Path:
    """The path of an image's record."""
    return sif.with_name(f"{sif.name}.json")


def read(sif: Path) -> Record | None:
    """The record; None if there is none."""
    path = path_for(sif)
    if not os.path.lexists(path):
        return None
    text = files.text(path, "the image's record")
    try:
        return Record.model_validate_json(text)
    except ValidationError as wrong:
        raise ConfigError(
            "the image's record is damaged",
            where=path,
            found=explained(wrong),
            fix="build the image again; or remove the record, and give --digest",
        ) from wrong


def deliver(made: Path, sif: Path, record: Record) -> None:
    """Put a finished image in its place, with its record."""
    os.chown(made, os.getuid(), os.getgid())
    # A moment without a record is better than one with another image's.
    path_for(sif).unlink(missing_ok=True)
    made.replace(sif)
    write(sif, record)


def write(sif: Path, record: Record) -> None:
    """Write the record beside the image, atomically."""
    files.write_atomic(path_for(sif), record.model_dump_json(indent=1) + "\n")
