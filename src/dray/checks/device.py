"""The GPUs, each used once; without one, why there is none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial

import torch

from dray.checks import drivers, image
from dray.checks.check import Skip, check
from dray.contract import gpus, node
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
        yield check(f"matmul {index}", partial(_matmul, torch.device("cuda", index)))


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


def _matmul(device: torch.device) -> str:
    """The most that this GPU gives a program, beside what its maker says."""
    maker = gpus.find(torch.cuda.get_device_name(device))
    half = torch.float16 if maker and not maker.bf16 else torch.bfloat16
    found = ceiling(device, half)
    kind = str(half).removeprefix("torch.")
    if maker is None:
        return f"{found:.0f} TFLOP/s in {kind}; gpus.toml does not have this GPU"
    peak = maker.bf16 or maker.fp16
    return f"{found:.0f} TFLOP/s in {kind}, {found / peak:.0%} of the maker's {peak:g} ({maker.source})"


def ceiling(device: torch.device, dtype: torch.dtype, size: int = 8192, seconds: float = 0.3) -> float:
    """TFLOP/s of square matrix products, once the clock has settled."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(3):
        rounds, began = 0, _now(device)
        while (took := _now(device) - began) < seconds / 3 or not rounds:
            for _ in range(4):
                left @ right
            rounds += 4
        best = max(best, 2 * size**3 * rounds / took / 1e12)
    return best


def _now(device: torch.device) -> float:
    """The time at which the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
