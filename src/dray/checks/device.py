"""Checks each GPU by using it; without a GPU, finds out why."""

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
_LARGEST = 8192
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def results() -> Iterator[Finding]:
    """The results for each device, or one that says why there is none."""
    count = torch.cuda.device_count()
    if not count:
        yield check("device", why_none)
    elif accelerator() in ("cuda", "rocm"):
        yield check("driver", driver)
    for index in range(count):
        yield check(f"device {index}", partial(works, index))
        yield check(f"products {index}", partial(right, index))
        yield check(f"matmul {index}", partial(_matmul, torch.device("cuda", index)))


def accelerator() -> str:
    """The accelerator for which this torch is built, named as in image.toml."""
    return "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"


def driver() -> str:
    """The driver's version. UnfitError: the image needs a newer one; Skip: it is not known."""
    return drivers.require(image.declared().driver, node.driver(accelerator()), accelerator())


def works(index: int) -> str:
    """The name and size of a GPU, after it has run a kernel."""
    about = torch.cuda.get_device_properties(index)
    kind = about.gcnArchName if torch.version.hip else f"compute capability {about.major}.{about.minor}"
    found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {kind}"
    try:
        torch.ones(8, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        if not any(message in str(error) for message in _NO_CODE):
            raise
        raise UnfitError(
            f"{found}: torch has no code for it",
            wanted=f"one of {' '.join(torch.cuda.get_arch_list())}",
            fix="use the image variant for this GPU",
        ) from None
    return found


def right(index: int | str) -> str:
    """Compare products of small whole numbers with the CPU's, bit by bit: no type and no order rounds them."""
    device = torch.device("cuda", index) if isinstance(index, int) else torch.device(index)
    numbers = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        left, other = (torch.randint(-1, 2, shape, generator=numbers).to(dtype) for shape in ((1024, 128), (128, 1024)))
        found, wanted = (left.to(device) @ other.to(device)).cpu().float(), left.float() @ other.float()
        if wrong := int((found != wanted).sum()):
            raise UnfitError(
                "it computes wrong products",
                wanted=f"the CPU's product of whole numbers, in {str(dtype).removeprefix('torch.')}",
                found=f"{wrong} of {wanted.numel()} numbers differ",
                fix="leave this node out (sbatch --exclude), and tell the administrators",
            )
    return "right in fp32, fp16 and bf16"


def memory(index: int | str, size: int = 1 << 30) -> str:
    """Allocate at most half of the free memory, check that it keeps what is written, and free it."""
    device = torch.device("cuda", index) if isinstance(index, int) else torch.device(index)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (2 * size, 2 * size)
    count = min(size, free // 2) // 8
    try:
        held = torch.arange(count, dtype=torch.int64, device=device)
        kept = int(held.sum())
    except torch.OutOfMemoryError as error:
        raise UnfitError(
            "it has no free memory",
            wanted=f"{count * 8 / 2**30:.2f} GiB",
            found=f"{free / 2**30:.2f} of {total / 2**30:.0f} GiB free: {str(error).splitlines()[0]}",
            fix="another program holds it: leave this node out (sbatch --exclude)",
        ) from error
    if kept != count * (count - 1) // 2:
        raise UnfitError(
            "its memory does not keep what is written",
            wanted="the sum of the numbers that were written",
            found=f"another sum over {count * 8 / 2**30:.2f} GiB",
            fix="leave this node out (sbatch --exclude), and tell the administrators",
        )
    del held
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"


def _half(device: torch.device) -> tuple[gpus.Gpu | None, torch.dtype]:
    """The GPU's data from its maker, and its native 16-bit type: older GPUs only emulate bf16."""
    maker = gpus.find(torch.cuda.get_device_name(device))
    return maker, torch.float16 if maker and not maker.bf16 else torch.bfloat16


def _matmul(device: torch.device) -> str:
    """The most TFLOP/s that this GPU reaches, compared with what its maker says."""
    maker, half = _half(device)
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


def quick_ceiling(device: torch.device, dtype: torch.dtype | None = None, seconds: float = 0.2) -> float:
    """`ceiling` in about so many seconds, also on a slow GPU: with the largest products for which there is time."""
    dtype = dtype or _half(device)[1]
    size = 512
    while True:
        square = torch.randn(size, size, device=device, dtype=dtype)
        square @ square  # the first one of a size also looks for the kernel
        began = _now(device)
        square @ square
        # Twice the size takes eight times as long, and `ceiling` has twelve products at least.
        if size >= _LARGEST or 8 * 12 * (_now(device) - began) > seconds / 2:
            return ceiling(device, dtype, size, seconds / 2)
        size *= 2


def _now(device: torch.device) -> float:
    """The time at which the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def why_none() -> str:
    """Raise why torch sees no GPU."""
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
    raise Skip(", ".join(["torch finds no GPU", *visible]))
