"""`python -m dray.checks.gpu PLAN.json LOCAL`: check one GPU of this node, before the rendezvous.

A process of its own, which the runner kills at its deadline. It prints its phase and its findings as lines of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from dray.checks import drivers, image
from dray.checks.check import Skip
from dray.contract import exit_codes, node
from dray.contract.findings import DrayError, Finding, UnfitError


def main(path: str, local: int) -> int:
    """Print the findings; return 0 also if there are some."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    _tell(phase="import torch")
    torch, device = importlib.import_module("torch"), importlib.import_module("dray.checks.device")
    try:
        _tell(phase="device")
        _present(plan, local, torch.cuda.device_count())
        _driver(plan["variant"])
        device.works(local)
        _tell(phase="matmul")
        device.right(local)
        _tell(phase="memory")
        device.memory(local)
        _tell(phase="ceiling")
        with suppress(RuntimeError):  # torch's, where there is no room for it: it is no condition
            _tell(tflops=round(device.quick_ceiling(torch.device("cuda", local)), 1))
        _tell(phase="health")
        for found in importlib.import_module("dray.checks.health").of(torch.cuda.get_device_properties(local)):
            _tell(finding=_of(local, found)._asdict())
    except UnfitError as unfit:
        _tell(finding=_of(local, unfit.finding)._asdict())
    except RuntimeError as error:  # torch's, of the driver and of CUDA or HIP
        lines = [text for text in str(error).splitlines() if text.strip()]
        found = Finding(
            "the driver or the GPU failed",
            wanted="a GPU that computes",
            found=lines[0] if lines else type(error).__name__,
            fix="leave this node out (sbatch --exclude), and tell the administrators",
            code=exit_codes.UNFIT,
        )
        _tell(finding=_of(local, found)._asdict())
    return exit_codes.DONE


def _tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _of(local: int, found: Finding) -> Finding:
    return found._replace(problem=f"GPU {local}: {found.problem}")


def _present(plan: dict[str, Any], local: int, count: int) -> None:
    if count > local:
        return
    raise UnfitError(
        "torch does not see this GPU",
        wanted=f"{plan['world']['ranks_per_node']} GPUs, one for each rank",
        found=f"{count}{_why_none(plan['variant'])}",
        fix="ask for GPUs (--gpus-per-node), or leave this node out; `python -m dray.checks` in the image says why",
    )


def _why_none(variant: str) -> str:
    try:
        if variant.startswith("rocm"):
            drivers.explain_amd()
        else:
            drivers.explain_nvidia(image.declared().driver, node.nvidia_driver())
    except DrayError as error:
        return f": {error.problem}"
    return ""


def _driver(variant: str) -> None:
    accelerator = "rocm" if variant.startswith("rocm") else "cuda"
    try:
        drivers.require(image.declared().driver, node.driver(accelerator), accelerator)
    except Skip:
        return


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)
