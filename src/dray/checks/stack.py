"""Which packages an image is made of, and which of them are here."""

from __future__ import annotations

from importlib import metadata

from dray.checks import declared

# The module whose import shows that it works, and the distribution under all its names. In this order an
# import's time is what the package adds to those before it.
STACK = {
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


def absent(module: str) -> bool:
    """Whether this package of the stack is simply not here, and was never said to be."""
    names = STACK.get(module)
    return names is not None and not declared.read().lists(*names) and version(names) is None


def version(names: tuple[str, ...]) -> str | None:
    """The version of whichever of these is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
