"""A GPU's driver, as far as a container sees it without root: its version, memory errors and lowered clocks."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dray.checks.run_check import Skip
from dray.contract import exit_codes, node
from dray.contract.findings import Finding, UnfitError

_AMD = Path("/dev/kfd")
_MODULES = {"cuda": "NVIDIA driver", "rocm": "amdgpu driver"}
_ANSWER_S = 15.0
_DEVICES = Path("/sys/bus/pci/devices")
_UNFIT = "leave this node out (sbatch --exclude), and tell the administrators"
# Bits of NVML's clocks event reasons; the others are of a GPU that idles or has its power limit, as usual.
_SLOW = {
    0x08: "the hardware lowers the clocks (HW slowdown)",
    0x20: "the GPU is too hot (SW thermal slowdown)",
    0x40: "the GPU is too hot (HW thermal slowdown)",
    0x80: "the power supply lowers the clocks (HW power brake)",
}
# Fields of nvidia-smi, by option. Older drivers and cards may not have one; so each is asked for alone.
_FIELDS = {
    "ecc.errors.uncorrected.volatile.total": "--query-gpu",
    "retired_pages.pending": "--query-gpu",
    "clocks_throttle_reasons.active": "--query-gpu",
    "remapped_rows.failure": "--query-remapped-rows",
    "remapped_rows.pending": "--query-remapped-rows",
}


def require_version(wanted: str | None, found: str | None, accelerator: str) -> str:
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
        require_version(wanted, found, "cuda")


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


def health(about: Any) -> Iterator[Finding]:  # noqa: ANN401  torch's properties of a device
    """The findings by nvidia-smi, which --nv brings into the container, or by amdgpu's files in /sys."""
    uuid = str(getattr(about, "uuid", ""))
    if uuid and shutil.which("nvidia-smi"):
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        yield from nvidia_health({field: _ask_nvidia_smi(name, option, field) for field, option in _FIELDS.items()})
    bus = [getattr(about, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if min(bus) >= 0:
        yield from amd_health(_DEVICES / "{:04x}:{:02x}:{:02x}.0".format(*bus) / "ras" / "umc_err_count")


def _ask_nvidia_smi(gpu: str, option: str, field: str) -> str:
    """The value of one field; empty if there is none."""
    argv = ["nvidia-smi", f"--id={gpu}", f"{option}={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_ANSWER_S)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def nvidia_health(values: Mapping[str, str]) -> Iterator[Finding]:
    """The findings in these values of nvidia-smi's fields."""
    if values["remapped_rows.failure"] == "Yes":
        yield _unfit("a row of its memory cannot be remapped", "remapped_rows.failure = Yes: replace the GPU")
    pending = [name for name, value in values.items() if name.endswith(".pending") and value == "Yes"]
    if pending:
        yield _unfit("its memory has errors, and it has not been reset since", f"{' and '.join(pending)} = Yes")
    name = "ecc.errors.uncorrected.volatile.total"
    if values[name].isdigit() and int(values[name]):  # not [N/A], [Not Supported]
        yield _uncorrected(f"{values[name]} since the driver was loaded ({name})")
    clocks = values["clocks_throttle_reasons.active"]
    bits = int(clocks, 16) if clocks.startswith("0x") else 0
    if slow := [text for bit, text in _SLOW.items() if bits & bit]:
        yield Finding("it is slower than it should be", found="; ".join(slow), fix="tell the administrators")


def amd_health(file: Path) -> Iterator[Finding]:
    """The findings in the file in which amdgpu counts memory errors: `ue: 0` and `ce: 0`."""
    text = file.read_text() if file.exists() else ""
    count = re.search(r"^ue: ([1-9][0-9]*)$", text, re.MULTILINE)
    if count:
        yield _uncorrected(f"{count[1]} since the driver was loaded ({file})")


def _uncorrected(found: str) -> Finding:
    fix = "if ranks fail on it, leave this node out (sbatch --exclude)"
    return Finding("its memory had errors that ECC did not correct", found=found, fix=fix)


def _unfit(problem: str, found: str) -> Finding:
    return Finding(problem, wanted="memory without errors", found=found, fix=_UNFIT, code=exit_codes.UNFIT)
