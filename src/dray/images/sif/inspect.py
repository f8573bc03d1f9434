"""What `dray image inspect` shows of an image."""

from __future__ import annotations

import json
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


def report(sif: Sif) -> dict[str, Any]:
    """Describe an image to a user who did not build it, from its file, without starting it. The size is in bytes."""
    text = contents.file(sif, FACTS)
    try:
        facts = json.loads(text or b"")
        packages = {name.replace("_", "-"): version for name, version in facts["packages"].items()}
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
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("dray did not build this image", where=sif.path, wanted=f"/{FACTS} in it") from None
