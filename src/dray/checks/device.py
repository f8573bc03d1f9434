"""The GPUs, each put to work once; where there are none, why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import torch

from dray.checks import declared, drivers
from dray.checks.result import Result, Skip, Unfit, attempt

_NO_CODE = ("no kernel image", "invalid device function")  # CUDA's words, HIP's words
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def results() -> Iterator[Result]:
    """One line a device, or one that says why there is none."""
    count = torch.cuda.device_count()
    if not count:
        yield attempt("device", _none)
    for index in range(count):
        yield attempt(f"device {index}", partial(_works, index))


def accelerator() -> str:
    """What this torch is built for, in the words of image.toml."""
    return "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"


def _works(index: int) -> str:
    about = torch.cuda.get_device_properties(index)
    kind = about.gcnArchName if torch.version.hip else f"compute capability {about.major}.{about.minor}"
    found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {kind}"
    ones = torch.ones(64, 64, device=f"cuda:{index}")
    try:
        total = (ones @ ones).sum().item()
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_CODE):
            raise
        raise Unfit(
            f"{found}: torch has no code for it",
            wanted=f"one of {' '.join(torch.cuda.get_arch_list())}",
            fix="take the variant that is made for this GPU",
        ) from None
    if total != 64**3:
        raise Unfit(f"{found}: a product of ones is {total}", wanted=str(64**3), fix="take the GPU out of service")
    return found


def _none() -> str:
    wanted = declared.read().accelerator
    if wanted is not None and wanted != accelerator():
        raise Unfit(f"this torch is built for {accelerator()}", wanted=wanted, fix="build the image with its own torch")
    match accelerator():
        case "cpu":
            raise Skip("none wanted: this torch is built for the CPU")
        case "cuda":
            drivers.explain_nvidia(declared.read().driver)
        case _:
            drivers.explain_amd()
    visible = [f"{name}={os.environ[name]!r}" for name in _VISIBLE if name in os.environ]
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        found = ", ".join([str(error).splitlines()[0], *visible])
        raise Skip(found, fix="ask for a GPU in the job (--gpus-per-node)") from None
    raise Skip(", ".join(["torch counts none", *visible]))
