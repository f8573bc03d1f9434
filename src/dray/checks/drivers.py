"""The host's driver, as far as a container can see it."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from dray.checks.result import Skip, Unfit

_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/dev/kfd")


def explain_nvidia(wanted: str | None, kernel: Path = _NVIDIA, library: str = "libcuda.so.1") -> None:
    """Raise where the driver explains that there is no device."""
    found = nvidia_version(kernel)
    loads = _loads(library)
    if found is None and not loads:
        raise Skip("this machine has no NVIDIA driver", fix="run on a node with an NVIDIA GPU")
    if not loads:
        raise Skip(
            f"the machine has NVIDIA driver {found}, but {library} is not in the container",
            fix="start it with --nv (Apptainer) or --gpus all (Docker)",
        )
    if wanted and found and _numbers(found) < _numbers(wanted):
        raise Unfit(
            f"NVIDIA driver {found}",
            wanted=f"{wanted} or newer",
            fix="take a variant for older drivers (dray-cuda12 needs 570.26), or a node with a newer one",
        )


def explain_amd(device: Path = _AMD) -> None:
    """Raise where the driver explains that there is no device."""
    if not device.exists():
        raise Skip(
            f"{device} is not here: no AMD GPU, or the container was started without it",
            fix="start it with --rocm (Apptainer) or --device /dev/kfd --device /dev/dri (Docker), on a GPU node",
        )
    if not os.access(device, os.R_OK | os.W_OK):
        raise Skip(
            f"{device} may not be opened by this user",
            fix="join its group (render or video): --group-add in Docker, the site's administrator elsewhere",
        )


def nvidia_version(kernel: Path = _NVIDIA) -> str | None:
    """The kernel module's version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul ...`."""
    try:
        found = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", kernel.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
