"""What cotainr needs to make an image of a variant: a Conda environment of the locked packages, and cotainr itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from dray.config.image import Image
from dray.contract.findings import ConfigError, UnfitError
from dray.images.rootfs.cotainr import ENVIRONMENT, FOLDER, TOOL, WANTED
from dray.images.sources import lock
from dray.images.sources.inputs import Source

VERSION = "2025.7.1"


def package() -> Path:
    """The folder of cotainr's modules, beside dray's own; in the one version of which dray knows what it does."""
    try:
        found = metadata.distribution("cotainr")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or found.version != VERSION:
        raise UnfitError(
            "cotainr is not beside dray" if found is None else "this cotainr is not the one that dray knows",
            wanted=f"cotainr {VERSION}",
            found=f"cotainr {found.version}" if found else None,
            fix=f"make .venv/cotainr\nor, where pip has installed dray: pip install cotainr=={VERSION}",
        )
    return Path(str(found.locate_file("cotainr")))


def require_licenses(*, accepted: bool) -> None:
    """cotainr asks on a terminal, which a build has not."""
    if not accepted:
        raise ConfigError(
            "cotainr downloads Miniforge, whose licence you have to accept",
            where="https://github.com/conda-forge/miniforge/blob/main/LICENSE",
            fix="--accept-licenses",
        )


def lay_out(checkout: Path, source: Source, *, miniforge: str = "") -> None:
    """Put it into the build's inputs, and in place of the step that makes a virtual environment the one that moves
    cotainr's there.
    """
    folder = source.inputs / FOLDER
    shutil.copytree(checkout / "containers" / FOLDER, folder)
    (folder / "50-python.sh").replace(source.inputs / "steps" / "50-python.sh")
    (folder / "bin").mkdir()
    (folder / "singularity.sh").rename(folder / "bin" / "singularity")
    shutil.copytree(package(), source.inputs / TOOL / "cotainr", ignore=shutil.ignore_patterns("__pycache__"))
    pins = lock.read(source.inputs / "requirements.lock")
    (source.inputs / ENVIRONMENT).write_text(environment(source.image, pins), encoding="utf-8")
    (source.inputs / WANTED).write_text(miniforge)
    with (source.inputs / "labels").open("a") as labels:
        labels.write(f"cotainr.version {VERSION}\ncotainr.url https://github.com/DeiC-HPC/cotainr\n")


def environment(image: Image, pins: Sequence[lock.Pin]) -> str:
    """environment.yml: Python by Conda, and the lock's packages by pip from the build's inputs, each by its hash."""
    return "".join(f"{line}\n" for line in _lines(image, pins))


def _lines(image: Image, pins: Sequence[lock.Pin]) -> Iterator[str]:
    yield f"name: dray-{image.variant}"
    yield "channels: [conda-forge, nodefaults]"
    yield "dependencies:"
    yield f"  - python={image.python}"
    yield "  - pip"
    yield "  - pip:"
    # DeepSpeed comes as a source, which a later step compiles.
    packages = [str(pin).replace(" \\\n   ", "") for pin in pins if pin.name != lock.SOURCE_ONLY]
    for line in ("--no-index", "--find-links /mnt/wheels", "--require-hashes", *packages):
        yield f"      - {json.dumps(line)}"
