"""Checks the host's driver, as far as a container can see it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from dray.checks.run_check import Skip
from dray.contract import node
from dray.contract.findings import UnfitError

_AMD = Path("/dev/kfd")
_MODULES = {"cuda": "NVIDIA driver", "rocm": "amdgpu driver"}


def require(wanted: str | None, found: str | None, accelerator: str) -> str:
    """Raise if the image needs a newer driver; Skip if the driver's version is not known."""
    module = _MODULES[accelerator]
    if found is None:
        raise Skip(f"the version of the {module} is not known here")
    if wanted and node.older(found, than=wanted):
        other = node.image_for(accelerator, found)
        raise UnfitError(
            f"{module} {found}",
            wanted=f"{wanted} or newer",
            fix="use a node with a newer driver" + (f", or image={other}, which runs with this one" if other else ""),
        )
    return f"{module} {found}"


def explain_nvidia(wanted: str | None, found: str | None, library: str = "libcuda.so.1") -> None:
    """Raise if the driver is the reason for no device; `found` is the kernel module's version."""
    try:
        ctypes.CDLL(library)
    except OSError:
        if found is None:
            raise Skip("this machine has no NVIDIA driver", fix="run on a node with an NVIDIA GPU") from None
        raise Skip(
            f"this machine has NVIDIA driver {found}, but the container lacks {library}",
            fix="start the container with --nv (Apptainer) or --gpus all (Docker)",
        ) from None
    if found:
        require(wanted, found, "cuda")


def explain_amd(device: Path = _AMD) -> None:
    """Raise if the driver is the reason for no device."""
    if not device.exists():
        raise Skip(
            f"{device} is missing: no AMD GPU, or the container was started without it",
            fix="run on a node with an AMD GPU; Docker: --device /dev/kfd --device /dev/dri; Apptainer with a minimal "
            "/dev: --bind /dev/kfd,/dev/dri",
        )
    if not os.access(device, os.R_OK | os.W_OK):
        raise Skip(
            f"this user may not open {device}",
            fix="join its group (render or video): --group-add in Docker, the site's administrator elsewhere",
        )
