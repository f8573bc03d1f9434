"""Checks the GPU of a rank, before the rendezvous."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from dray.checks import device, health
from dray.checks.check import Skip
from dray.contract import exit_codes
from dray.contract.findings import DrayError, Finding, UnfitError

if TYPE_CHECKING:
    from dray.checks.rank import Rank


def check(rank: Rank) -> None:
    """Report the findings of the rank's GPU."""
    local = rank.local
    try:
        rank.phase("device")
        _require_present(rank)
        with suppress(Skip):
            device.driver()
        device.works(local)
        rank.phase("matmul")
        device.right(local)
        rank.phase("memory")
        device.memory(local)
        rank.phase("ceiling")
        with suppress(RuntimeError):  # torch's, where there is no room for it: it is no condition
            rank.tell(tflops=round(device.quick_ceiling(torch.device("cuda", local)), 1))
        rank.phase("health")
        for finding in health.of(torch.cuda.get_device_properties(local)):
            rank.report(_of(rank, finding))
    except UnfitError as unfit:
        rank.report(_of(rank, unfit.finding))
    except RuntimeError as error:  # torch's, of the driver and of CUDA or HIP
        lines = [text for text in str(error).splitlines() if text.strip()]
        finding = Finding(
            "the driver or the GPU failed",
            wanted="a GPU that computes",
            found=lines[0] if lines else type(error).__name__,
            fix="leave this node out (sbatch --exclude), and tell the administrators",
            code=exit_codes.UNFIT,
        )
        rank.report(_of(rank, finding))


def _of(rank: Rank, finding: Finding) -> Finding:
    return finding._replace(problem=f"GPU {rank.local}: {finding.problem}", node=rank.node)


def _require_present(rank: Rank) -> None:
    if (count := torch.cuda.device_count()) > rank.local:
        return
    why = f": {_why_none()}" if not count else ""
    raise UnfitError(
        "torch does not see this GPU",
        wanted=f"{rank.plan['world']['ranks_per_node']} GPUs, one for each rank",
        found=f"{count}{why}",
        fix="ask for GPUs (--gpus-per-node), or leave this node out; `python -m dray.checks` in the image says why",
    )


def _why_none() -> str:
    try:
        return device.why_none()
    except DrayError as error:
        return error.problem
