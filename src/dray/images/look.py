"""What an image is and holds, in a few lines."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

from dray.errors import ConfigError
from dray.images import contents, record, verify
from dray.images.siffile import Sif

FACTS = "opt/dray/image.json"
MAIN = (
    "torch",
    "triton",
    "pytorch-triton-rocm",
    "transformers",
    "accelerate",
    "deepspeed",
    "datasets",
    "tokenizers",
    "safetensors",
    "aihwkit-lightning",
    "tensorboard",
)
DEBIAN = "Debian"
_OWN = "opt/dray/"
_PACKAGE = re.compile(r"opt/dray/lib/python[\d.]+/site-packages/([^/.-]+)")


@dataclass(frozen=True, kw_only=True)
class Report:
    """An image for people who did not build it."""

    file: str
    variant: str
    digest: str
    size: int
    """Bytes of the file."""
    architecture: str
    signed: list[str]
    """Fingerprints that its signatures name, unchecked."""
    base: str | None
    python: str
    dray: str
    versions: dict[str, str]
    """Of the main packages."""
    unpacked: int
    """Bytes of all files."""
    packages: dict[str, int]
    """Bytes of each package's files, unpacked, the largest first; how well each is compressed nobody can tell."""


def report(sif: Sif) -> Report:
    """Read it out of the file; nothing of the image is started."""
    found = contents.file(sif, FACTS)
    if found is None:
        raise ConfigError("dray did not build this image", where=sif.path, wanted=f"/{FACTS} in it")
    try:
        facts = json.loads(found)
        packages = {name.replace("_", "-"): version for name, version in facts["packages"].items()}
        known = record.read(sif.path)
        sizes = contents.sizes(sif)
        return Report(
            file=str(sif.path),
            variant=facts["variant"],
            digest=verify.digest(sif.path),
            size=sif.path.stat().st_size,
            architecture=sif.architecture,
            signed=sif.signers(),
            base=facts.get("base") or (known.base if known else None),
            python=facts["python"],
            dray=facts["dray"],
            versions={name: packages[name] for name in MAIN if name in packages},
            unpacked=sum(sizes.values()),
            packages=_by_package(sizes),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ConfigError(
            "the image does not say what it is", where=f"{sif.path}: /{FACTS}", found=repr(wrong)
        ) from wrong


def _by_package(sizes: dict[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for path, size in sizes.items():
        total[_package(path)] += size
    return dict(total.most_common())


def _package(path: str) -> str:
    """torch-2.13.0.dist-info and torch.libs are torch's too."""
    if not path.startswith(_OWN):
        return DEBIAN
    found = _PACKAGE.match(path)
    return found[1] if found else _OWN.rstrip("/")
