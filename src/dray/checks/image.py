"""Checks the image: imports each package, and compares it with image.json, which the build wrote."""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dray.checks.run_check import Skip, check, passed
from dray.contract.findings import Finding, UnfitError

# The module whose import shows that the package works, and the names of its distribution. In this order an
# import's time is what the package adds to those before it.
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "safetensors.torch": ("safetensors",),
    "tokenizers": ("tokenizers",),
    "transformers.trainer": ("transformers",),  # `import transformers` alone imports next to nothing
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "datasets": ("datasets",),
    "peft": ("peft",),
    "aihwkit_lightning": ("aihwkit-lightning",),
    "torch.utils.tensorboard": ("tensorboard",),
    "dray": ("dray",),
}


class Image(NamedTuple):
    """What image.json declares; empty if this Python is not in an image."""

    variant: str | None = None
    accelerator: str | None = None
    driver: str | None = None
    architectures: Sequence[str] = ()
    packages: Mapping[str, str] = MappingProxyType({})

    def lists(self, *distributions: str) -> bool:
        """Whether the image declares one of these packages, whose names have no underscore."""
        return not {name.replace("_", "-") for name in self.packages}.isdisjoint(distributions)


def path() -> Path:
    """The path of image.json; in an image sys.prefix is /opt/dray."""
    return Path(sys.prefix) / "image.json"


@cache
def declared() -> Image:
    """Read image.json, and ignore keys of a newer dray."""
    content = json.loads(path().read_text(encoding="utf-8")) if path().exists() else {}
    return Image(**{name: content[name] for name in Image._fields if name in content})


def absent(module: str) -> bool:
    """Whether this package is not installed, and the image does not declare it."""
    names = PACKAGES.get(module)
    return names is not None and not declared().lists(*names) and _version(names) is None


def results() -> Iterator[Finding]:
    """The results of the image, its Python, then each package."""
    yield check("image", _image)
    yield passed("python", f"{platform.python_version()}, {sys.executable}")
    for module, names in PACKAGES.items():
        yield check(names[0], partial(_imported, module, names))


def _image() -> str:
    image = declared()
    if image.variant is None:
        raise Skip(f"no {path()}: this Python is not in an image")
    driver = f", driver {image.driver} or newer" if image.driver else ""
    return f"{image.variant}, for {' '.join([image.accelerator or 'cpu', *image.architectures])}{driver}"


def _imported(name: str, distributions: tuple[str, ...]) -> str:
    if absent(name):
        raise Skip("not in this image" if declared().packages else "not installed")
    module = importlib.import_module(name)
    package = sys.modules[name.partition(".")[0]]
    if declared().packages and not Path(str(package.__file__)).is_relative_to(sys.prefix):
        raise UnfitError(
            f"{package.__file__} hides the image's own package",
            wanted=f"a file under {sys.prefix}",
            fix="unset PYTHONPATH before the image starts, and start in a folder without a module of this name",
        )
    version = str(_version(distributions))
    if name != "torch":
        return version
    cuda, hip = module.version.cuda, module.version.hip
    return f"{version}, {f'CUDA {cuda}' if cuda else f'HIP {hip}' if hip else 'CPU only'}"


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None
