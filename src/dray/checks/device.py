"""Checks each GPU by using it; without a GPU, finds out why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from dray.checks import drivers, image
from dray.checks.run_check import Skip, check
from dray.contract import exit_codes, hardware, node
from dray.contract.findings import DrayError, Finding, UnfitError

if TYPE_CHECKING:
    from dray.checks.rank import Rank

_NO_CODE = ("no kernel image", "invalid device function")  # by CUDA, by HIP
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ADMINISTRATORS = "leave this node out (sbatch --exclude), and tell the administrators"


def results() -> Iterator[Finding]:
    """The results for each device, or one that says why there is none."""
    if not torch.cuda.device_count():
        yield check("device", why_none)
        return
    yield check("driver", driver)
    for index in range(torch.cuda.device_count()):
        for name, step in (*_steps().items(), ("matmul", _matmul)):
            yield check(f"{name} {index}", partial(step, index))


def _steps() -> dict[str, Callable[[int], str]]:
    return {"device": works, "products": right, "memory": memory}


def of_rank(rank: Rank) -> None:
    """Report the findings of the rank's GPU, each phase before it begins."""
    for finding in _findings(rank):
        rank.report(finding._replace(problem=f"GPU {rank.local}: {finding.problem}"))


def _findings(rank: Rank) -> Iterator[Finding]:
    rank.tell(phase="driver")
    try:
        _require_present(rank)
        with suppress(Skip):
            driver()
        for name, step in _steps().items():
            rank.tell(phase=name)
            step(rank.local)
        rank.tell(phase="matmul")
        with suppress(RuntimeError):  # torch's, where there is no room for it: it is no condition
            rank.tell(tflops=round(ceiling(torch.device("cuda", rank.local)), 1))
        rank.tell(phase="health")
        yield from drivers.health(torch.cuda.get_device_properties(rank.local))
    except UnfitError as unfit:
        yield unfit.finding
    except RuntimeError as error:  # torch's, of the driver and of CUDA or HIP
        problem, found = "the driver or the GPU failed", str(error).strip().partition("\n")[0]
        yield Finding(problem, wanted="a GPU that computes", found=found, fix=_ADMINISTRATORS, code=exit_codes.UNFIT)


def _require_present(rank: Rank) -> None:
    count = torch.cuda.device_count()
    if count > rank.local:
        return
    found = str(count)
    if not count:
        try:
            why_none()
        except DrayError as error:
            found += f": {error.problem}"
    raise UnfitError(
        "torch does not see this GPU",
        wanted=f"{rank.plan['world']['ranks_per_node']} GPUs, one for each rank",
        found=found,
        fix="ask for GPUs (--gpus-per-node), or leave this node out; `python -m dray.checks` in the image says why",
    )


def accelerator() -> str:
    """The accelerator for which this torch is built, named as in image.toml."""
    return "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"


def driver() -> str:
    """The driver's version. UnfitError: the image needs a newer one; Skip: it is not known."""
    return drivers.require_version(image.declared().driver, node.driver(accelerator()), accelerator())


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
    device = torch.device(index)
    numbers = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        left = torch.randint(-1, 2, (1024, 128), generator=numbers).to(dtype)
        product, wanted = (left.to(device) @ left.to(device).T).cpu().float(), left.float() @ left.float().T
        if wrong := int((product != wanted).sum()):
            raise UnfitError(
                "it computes wrong products",
                wanted=f"the CPU's product of whole numbers, in {str(dtype).removeprefix('torch.')}",
                found=f"{wrong} of {wanted.numel()} numbers differ",
                fix=_ADMINISTRATORS,
            )
    return "right in fp32, fp16 and bf16"


def memory(index: int | str, size: int = 1 << 30) -> str:
    """Allocate at most half of the free memory, check that it keeps what is written, and free it."""
    device = torch.device(index)
    free, total = torch.cuda.mem_get_info(device)
    count = min(size, free // 2) // 8
    if int(torch.arange(count, dtype=torch.int64, device=device).sum()) != count * (count - 1) // 2:
        raise UnfitError(
            "its memory does not keep what is written",
            wanted="the sum of the numbers that were written",
            found=f"another sum over {count * 8 / 2**30:.2f} GiB",
            fix=_ADMINISTRATORS,
        )
    torch.cuda.empty_cache()
    return f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"


def _matmul(index: int) -> str:
    """The most TFLOP/s that this GPU reaches, compared with what its maker says."""
    device = torch.device("cuda", index)
    maker, half = hardware.find_gpu(torch.cuda.get_device_name(device)), _half(device)
    tflops = ceiling(device, half)
    found = f"{tflops:.0f} TFLOP/s in {str(half).removeprefix('torch.')}"
    if maker is None:
        return f"{found}; gpus.toml does not have this GPU"
    peak = maker.bf16 or maker.fp16
    return f"{found}, {tflops / peak:.0%} of the maker's {peak:g} ({maker.source})"


def _half(device: torch.device) -> torch.dtype:
    """The GPU's native 16-bit type: older GPUs only emulate bf16."""
    maker = hardware.find_gpu(torch.cuda.get_device_name(device))
    return torch.float16 if maker and not maker.bf16 else torch.bfloat16


def ceiling(device: torch.device, dtype: torch.dtype | None = None, size: int = 8192, rounds: int = 32) -> float:
    """TFLOP/s of square matrix products, once the clock has settled: a fifth of a second on an H100, one on a V100."""
    square = torch.randn(size, size, device=device, dtype=dtype or _half(device))
    square @ square  # the first one also looks for the kernel
    took = []
    for _ in range(3):
        began = now(device)
        for _ in range(rounds):
            square @ square
        took.append(now(device) - began)
    return 2e-12 * size**3 * rounds / min(took)


def now(device: torch.device) -> float:
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
    if accelerator() == "cpu":
        raise Skip("this torch is built for the CPU")
    if accelerator() == "cuda":
        drivers.explain_nvidia(image.declared().driver, node.nvidia_driver())
    else:
        drivers.explain_amd()
    found = "torch finds no GPU"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        found = str(error).splitlines()[0]
    visible = [f"{name}={os.environ[name]!r}" for name in _VISIBLE if name in os.environ]
    raise Skip(", ".join([found, *visible]), fix="ask for a GPU in the job (--gpus-per-node)")
