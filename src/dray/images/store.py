"""Where a variant's image is: the SIF in build/, or the tag in Docker or Podman."""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from dray import engines
from dray.config.checkout import root
from dray.contract.findings import ConfigError, UnfitError
from dray.images.sif import record, verify
from dray.images.sif.format import MAGIC


def docker_tag(variant: str) -> str:
    """The name that `make image-VARIANT-docker` gives."""
    return f"dray:{variant}"


def in_engine(engine: str, variant: str) -> str:
    """The image of Docker or Podman, which must be there: they would look on a registry, where it never was."""
    from dray.containers import images  # noqa: PLC0415  the Docker SDK, which a job's plan need not load

    tag = engines.get(engine).store_prefix + docker_tag(variant)
    if not images.find(engine, docker_tag(variant)):
        raise ConfigError(
            "the image does not exist",
            wanted=f"{tag} in {engine.capitalize()}",
            fix=f"dray image build {variant} --format {engine}",
        )
    return tag


def bare_python() -> str:
    """This very Python, which must have the training stack."""
    if find_spec("torch") is None:
        raise UnfitError(
            "this Python cannot train",
            where=sys.executable,
            wanted="torch and transformers",
            fix="make demo installs them into .venv; or use --engine docker",
        )
    if not distribution("dray").entry_points.select(group="torchrun.handlers"):
        raise UnfitError(
            "this Python has an older installation of dray than its source",
            where=sys.executable,
            wanted="torchrun's rendezvous `dray`, which the installation registers",
            fix=shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", "--editable", str(root())]),
        )
    return sys.executable


def sif(checkout: Path, variant: str) -> Path:
    """The file that `make image-VARIANT` makes."""
    return checkout / "build" / f"dray-{variant}.sif"


def failed(checkout: Path, variant: str) -> Path:
    """The sandbox of the last build that failed."""
    return checkout / "build" / "failed" / variant


def job_file(checkout: Path, variant: str) -> Path:
    """The file that a job starts: DRAY_IMAGE, else the variant's own."""
    return Path(os.environ.get("DRAY_IMAGE") or sif(checkout, variant))


def variant(image: Path | None = None) -> str:
    """Of the image that this program runs in, or of that file; empty where it is none, or has no record."""
    if image is None:
        try:
            found = json.loads((Path(sys.prefix) / "image.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""  # what is damaged, the image's own checks say
        return str(found.get("variant", ""))
    known = record.read(image)
    return known.variant if known else ""


def required(checkout: Path, variant: str, digest: str | None = None) -> Path:
    """The same, and before anything is queued it must be there, and be the one that the recipe wants."""
    file = job_file(checkout, variant)
    if not file.is_file():
        raise ConfigError(
            "the image does not exist",
            wanted=f"{file} (the recipe's image is {variant})",
            fix=f"make image-{variant}, or set DRAY_IMAGE to an image that dray has built",
        )
    with file.open("rb") as stream:
        head = stream.read(64)
    if MAGIC not in head and not head.startswith(b"hsqs"):
        raise ConfigError(
            "the image is no image",
            where=file,
            wanted="a SIF, as make image-VARIANT builds it, or a squashfs",
            found="an empty file" if not head else ascii(head[:16].decode("latin-1")),
            fix=f"make image-{variant}, or copy the file again: a copy that was cut off looks like this",
        )
    if digest:
        verify.require(file, digest, "the recipe's image_digest")
    return file
