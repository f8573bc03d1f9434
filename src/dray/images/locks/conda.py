"""environment.yml: a variant's lock as a conda file, for cotainr and for Conda itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dray.config.image_definition import Image
from dray.contract.findings import ConfigError
from dray.images.locks import lock
from dray.images.locks.lock import SOURCE_ONLY, Pin

# Conda hands the list under `pip:` to pip as the lines of a requirements file, options too.
_HEAD = """\
# `dray image lock {variant}` writes this file: the packages of requirements.lock, for cotainr or Conda.
#   cotainr build x.sif --system=SYSTEM --conda-env=containers/{variant}/environment.yml
# dray is not in it: `dray image adopt x.sif` puts dray beside the image.
name: dray-{variant}
channels:
  - conda-forge
  - nodefaults
dependencies:
  - python={python}
  - pip
  - pip:
"""
_OPTIONS = ("--require-hashes", '"--only-binary :all:"')  # what ends with a colon is else a key of YAML's
# accelerate imports a DeepSpeed that is there, and one without operators or a compiler breaks scripts that need none.
_SOURCE_ONLY = """\
# DeepSpeed, for zero1 to zero3, has no wheel. If you need it, uncomment the next three lines: pip builds it by a
# setuptools without a hash, and without operators. A job compiles those that it uses, by the image's compiler.
"""


def path(checkout: Path, variant: str) -> Path:
    """The path of a variant's environment.yml."""
    return checkout / "containers" / variant / "environment.yml"


def text(image: Image, pins: Iterable[Pin]) -> str:
    """Python and pip by Conda, then each package by its hashes, and the vendors' indexes."""
    versions = {vendor.name: vendor.version for vendor in image.vendor}
    indexes = dict.fromkeys(f"--extra-index-url {vendor.index}" for vendor in image.vendor)
    lines = [f"- {option}" for option in (*_OPTIONS, *indexes)]
    for pin in pins:
        package = [f"- {pin.name}=={versions.get(pin.name, pin.version)}"]
        package += [f"  --hash=sha256:{digest}" for digest in pin.hashes]
        if pin.name == SOURCE_ONLY:
            lines += _SOURCE_ONLY.splitlines()
            package = [f"# {line}" for line in (f"- --no-binary {pin.name}", *package)]
        lines += package
    head = _HEAD.format(variant=image.variant, python=image.python)
    return head + "".join(f"      {line}\n" for line in lines)


def update(checkout: Path, image: Image, *, check: bool = False) -> list[str]:
    """Write the file from the lock, or refuse one that differs if this is a `check`. Returns what changed."""
    file = path(checkout, image.variant)
    wanted = text(image, lock.read(lock.of(checkout, image)[0]))
    if file.is_file() and file.read_text(encoding="utf-8") == wanted:
        return []
    if check:
        fix = f"dray image lock {image.variant}"
        raise ConfigError("the conda file differs from the lock", where=file, fix=fix)
    file.write_text(wanted, encoding="utf-8")
    return [f"{file.name}: written anew"]
