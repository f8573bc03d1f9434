"""Which packages an image is made of, and which of them are here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from dray.checks import declared


@dataclass(frozen=True)
class Package:
    """A distribution under all its names, and the module whose import shows that it works."""

    module: str
    names: tuple[str, ...]


# In this order an import's time is what the package adds to those before it.
STACK = (
    Package("torch", ("torch",)),
    Package("triton", ("triton", "pytorch-triton-rocm", "triton-rocm")),
    Package("safetensors.torch", ("safetensors",)),
    Package("tokenizers", ("tokenizers",)),
    Package("transformers.trainer", ("transformers",)),  # `import transformers` alone imports next to nothing
    Package("accelerate", ("accelerate",)),
    Package("deepspeed", ("deepspeed",)),
    Package("datasets", ("datasets",)),
    Package("aihwkit_lightning", ("aihwkit-lightning",)),
    Package("torch.utils.tensorboard", ("tensorboard",)),
    Package("dray", ("dray",)),
)


def absent(module: str) -> bool:
    """Whether this package of the stack is simply not here, and was never said to be."""
    names = next((package.names for package in STACK if package.module == module), None)
    return names is not None and not declared.read().lists(*names) and version(names) is None


def version(names: tuple[str, ...]) -> str | None:
    """The version of whichever of these is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
