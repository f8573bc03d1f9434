"""What `dray image inspect` shows of an image."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from dray.contract.findings import ConfigError
from dray.images.sif import contents, verify
from dray.images.sif.format import Sif

FACTS = "opt/dray/image.json"
MAIN = (
    "torch",
    "triton",
    "pytorch-triton-rocm",
    "triton-rocm",
    "transformers",
    "accelerate",
    "deepspeed",
    "datasets",
    "peft",
    "tokenizers",
    "safetensors",
    "aihwkit-lightning",
    "tensorboard",
)
DEBIAN = "Debian"
_OWN = "opt/dray/"
_PACKAGE = re.compile(r"opt/dray/lib/python[\d.]+/site-packages/([^/.-]+)")


def report(sif: Sif) -> dict[str, Any]:
    """Describe an image to a user who did not build it, from its file, without starting it. Sizes are bytes."""
    found = contents.file(sif, FACTS)
    if found is None:
        raise ConfigError("dray did not build this image", where=sif.path, wanted=f"/{FACTS} in it")
    try:
        facts = json.loads(found)
        packages = {name.replace("_", "-"): version for name, version in facts["packages"].items()}
        sizes = contents.sizes(sif)
        return {
            "file": str(sif.path),
            "variant": facts["variant"],
            "digest": verify.digest(sif.path),
            "size": sif.path.stat().st_size,
            "architecture": sif.architecture,
            "signed": sif.signers(),  # as its signatures name them, unchecked
            "base": facts["base"],
            "python": facts["python"],
            "dray": facts["dray"],
            "versions": {name: packages[name] for name in MAIN if name in packages},
            "unpacked": sum(sizes.values()),
            "packages": _by_package(sizes),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ConfigError(
            "the image's description is damaged", where=f"{sif.path}: /{FACTS}", found=repr(wrong)
        ) from wrong


def _by_package(sizes: dict[str, int]) -> dict[str, int]:
    """The unpacked size of each package, the largest first; a squashfs does not show compressed sizes."""
    total: Counter[str] = Counter()
    for path, size in sizes.items():
        total[_package(path)] += size
    return dict(total.most_common())


def _package(path: str) -> str:
    """The package of a file; torch-2.13.0.dist-info and torch.libs belong to torch too."""
    if not path.startswith(_OWN):
        return DEBIAN
    found = _PACKAGE.match(path)
    return found[1] if found else _OWN.rstrip("/")
