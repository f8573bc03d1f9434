"""The whole stack, each package imported for real."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dray.checks import declared, stack
from dray.checks.result import Result, Skip, Unfit, attempt


def results() -> Iterator[Result]:
    """The image, its Python, then each package."""
    yield attempt("image", _image)
    yield Result(check="python", state="ok", found=f"{platform.python_version()}, {sys.executable}")
    for module, names in stack.STACK.items():
        yield attempt(names[0], partial(_imported, module, names))


def _image() -> str:
    image = declared.read()
    if image.variant is None:
        raise Skip(f"no {declared.path()}: this Python is in no image")
    driver = f", driver {image.driver} or newer" if image.driver else ""
    return f"{image.variant}, for {' '.join([image.accelerator or 'cpu', *image.architectures])}{driver}"


def _imported(name: str, distributions: tuple[str, ...]) -> str:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        if stack.absent(name):
            raise Skip("not in this image" if declared.read().packages else "not installed") from None
        raise
    module = sys.modules[name.partition(".")[0]]
    _is_the_images_own(str(module.__file__))
    version = stack.version(distributions) or str(getattr(module, "__version__", "unknown"))
    return version + _built_for(module) if name == "torch" else version


def _is_the_images_own(file: str) -> None:
    if declared.read().packages and not Path(file).is_relative_to(sys.prefix):
        raise Unfit(
            f"{file} hides the image's own",
            wanted=f"a file under {sys.prefix}",
            fix="unset PYTHONPATH before the image starts, and start in a folder without a module of this name",
        )


def _built_for(torch: object) -> str:
    version = getattr(torch, "version", None)
    cuda, hip = getattr(version, "cuda", None), getattr(version, "hip", None)
    return f", CUDA {cuda}" if cuda else f", HIP {hip}" if hip else ", CPU only"
