"""The GPUs, each used once; without one, why there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import torch

from dray.checks import drivers, image
from dray.checks.check import Skip, check
from dray.contract import node
from dray.contract.findings import Finding, UnfitError

_NO_CODE = ("no kernel image", "invalid device function")  # by CUDA, by HIP
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def results() -> Iterator[Finding]:
    """One result for each device, or one that says why there is none."""
    count = torch.cuda.device_count()
    if not count:
        yield check("device", _none)
    elif accelerator() in ("cuda", "rocm"):
        yield check("driver", _driver)
    for index in range(count):
        yield check(f"device {index}", partial(_works, index))


def accelerator() -> str:
    """What this torch is built for, named as in image.toml."""
    return "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"


def _driver() -> str:
    return drivers.require(image.declared().driver, node.driver(accelerator()), accelerator())


def _works(index: int) -> str:
    about = torch.cuda.get_device_properties(index)
    kind = about.gcnArchName if torch.version.hip else f"compute capability {about.major}.{about.minor}"
    found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {kind}"
    ones = torch.ones(64, 64, device=f"cuda:{index}")
    try:
        total = (ones @ ones).sum().item()
    except RuntimeError as error:
        if not any(message in str(error) for message in _NO_CODE):
            raise
        raise UnfitError(
            f"{found}: torch has no code for it",
            wanted=f"one of {' '.join(torch.cuda.get_arch_list())}",
            fix="use the image variant for this GPU",
        ) from None
    if total != 64**3:
        raise UnfitError(f"{found}: a product of ones is {total}", wanted=str(64**3), fix="take the GPU out of service")
    return found


def _none() -> str:
    wanted = image.declared().accelerator
    if wanted is not None and wanted != accelerator():
        raise UnfitError(
            f"this torch is built for {accelerator()}", wanted=wanted, fix="build the image with its own torch"
        )
    match accelerator():
        case "cpu":
            raise Skip("this torch is built for the CPU")
        case "cuda":
            drivers.explain_nvidia(image.declared().driver, node.nvidia_driver())
        case _:
            drivers.explain_amd()
    visible = [f"{name}={os.environ[name]!r}" for name in _VISIBLE if name in os.environ]
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        found = ", ".join([str(error).splitlines()[0], *visible])
        raise Skip(found, fix="ask for a GPU in the job (--gpus-per-node)") from None
    raise Skip(", ".join(["torch finds none", *visible]))
