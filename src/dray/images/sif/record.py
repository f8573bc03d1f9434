"""The record of a built image or layer, in a file beside it: dray-cpu.sif has dray-cpu.sif.json."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from dray.config.image import Digest
from dray.config.model import Spec, explained
from dray.contract.files import read as read_file
from dray.contract.files import write_atomic
from dray.contract.findings import ConfigError


class File(Spec):
    """The SIF."""

    sha256: Digest
    """Of the whole file; it changes when the file is signed."""
    size: int
    """Bytes."""


class Record(Spec):
    """One build."""

    variant: str
    """Which image."""
    dray: str
    """The version of dray in it."""
    base: str
    """The image that it was built on, or the digest of the tar; of a layer the image that it is for."""
    inputs: Digest
    """Digest of all that it was built from."""
    epoch: int
    """The time that all of its files carry."""
    tools: dict[str, str]
    """Versions of what built it: apptainer, mksquashfs."""
    sif: File
    python: str = ""
    """Of a layer: the Python that its modules are compiled for."""
    needs: dict[str, str] = Field(default_factory=dict)
    """Of a layer: the image's packages that its own use, in the versions that it was locked for."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Of a layer: what it adds."""
    signed: str | None = None
    """Fingerprint of the key that signed the SIF."""


def path_for(sif: Path) -> Path:
    """Where the record of this image is."""
    return sif.with_name(f"{sif.name}.json")


def read(sif: Path) -> Record | None:
    """The record, if there is one."""
    path = path_for(sif)
    try:
        return Record.model_validate_json(read_file(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError("the image's record cannot be read", where=path, found=error.strerror) from error
    except ValidationError as wrong:
        raise ConfigError(
            "the image's record is damaged",
            where=path,
            found=explained(wrong),
            fix="build the image again; or remove the record, and give --digest",
        ) from wrong


def write(sif: Path, record: Record) -> None:
    """Put it beside the image, atomically."""
    write_atomic(path_for(sif), record.model_dump_json(indent=1) + "\n")
