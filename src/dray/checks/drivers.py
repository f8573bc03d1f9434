"""The host's driver, as far as a container can see it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from dray.checks.check import Skip
from dray.contract.findings import UnfitError

_AMD = Path("/dev/kfd")


def explain_nvidia(wanted: str | None, found: str | None, library: str = "libcuda.so.1") -> None:
    """Raise if the driver is why there is no device; `found` is the kernel module's version."""
    loads = _loads(library)
    if found is None and not loads:
        raise Skip("this machine has no NVIDIA driver", fix="run on a node with an NVIDIA GPU")
    if not loads:
        raise Skip(
            f"the machine has NVIDIA driver {found}, but {library} is not in the container",
            fix="start it with --nv (Apptainer) or --gpus all (Docker)",
        )
    if wanted and found and _numbers(found) < _numbers(wanted):
        raise UnfitError(
            f"NVIDIA driver {found}",
            wanted=f"{wanted} or newer",
            fix="use the cuda12 image, which needs driver 570.26, or a node with a newer driver",
        )


def explain_amd(device: Path = _AMD) -> None:
    """Raise if the driver is why there is no device."""
    if not device.exists():
        raise Skip(
            f"{device} is missing: no AMD GPU, or the container was started without it",
            fix="run on a node with an AMD GPU; Docker: --device /dev/kfd --device /dev/dri, Apptainer with a minimal /dev: --bind",
        )
    if not os.access(device, os.R_OK | os.W_OK):
        raise Skip(
            f"this user may not open {device}",
            fix="join its group (render or video): --group-add in Docker, the site's administrator elsewhere",
        )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
