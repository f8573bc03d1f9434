"""Reads a GPU's own health without root: memory errors and lowered clocks."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dray.contract import exit_codes
from dray.contract.findings import Finding

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
# Of nvidia-smi: an option, and a field that older drivers and cards may not have; so each is asked for alone.
_FIELDS = {
    "uncorrected": ("--query-gpu", "ecc.errors.uncorrected.volatile.total"),
    "pages": ("--query-gpu", "retired_pages.pending"),
    "clocks": ("--query-gpu", "clocks_throttle_reasons.active"),
    "rows_failed": ("--query-remapped-rows", "remapped_rows.failure"),
    "rows_pending": ("--query-remapped-rows", "remapped_rows.pending"),
}


def of(about: Any) -> Iterator[Finding]:  # noqa: ANN401  torch's properties of a device
    """The findings by nvidia-smi, which --nv brings into the container, or by amdgpu's files in /sys."""
    uuid = str(getattr(about, "uuid", ""))
    if uuid and (program := shutil.which("nvidia-smi")):
        yield from nvidia({name: _asked(program, uuid, *field) for name, field in _FIELDS.items()})
    bus = [getattr(about, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if min(bus) >= 0:
        yield from amd(_DEVICES / "{:04x}:{:02x}:{:02x}.0".format(*bus) / "ras" / "umc_err_count")


def _asked(program: str, uuid: str, option: str, field: str) -> str:
    """The value of one field; empty if there is none."""
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    argv = [program, f"--id={name}", f"{option}={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603  our own list
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def nvidia(told: dict[str, str]) -> Iterator[Finding]:
    """The findings in these answers of nvidia-smi."""
    if told["rows_failed"] == "Yes":
        yield _unfit("a row of its memory cannot be remapped", "remapped_rows.failure = Yes: replace the GPU")
    pending = [_FIELDS[name][1] for name in ("pages", "rows_pending") if told[name] == "Yes"]
    if pending:
        yield _unfit("its memory has errors, and it has not been reset since", f"{' and '.join(pending)} = Yes")
    if told["uncorrected"].isdigit() and int(told["uncorrected"]):
        yield Finding(
            "its memory had errors that ECC did not correct",
            found=f"{told['uncorrected']} since the driver was loaded (ecc.errors.uncorrected.volatile.total)",
            fix="if ranks fail on it, leave this node out (sbatch --exclude)",
        )
    bits = int(told["clocks"], 16) if re.fullmatch("0x[0-9a-fA-F]{1,16}", told["clocks"]) else 0
    if slow := [text for bit, text in _SLOW.items() if bits & bit]:
        yield Finding("it is slower than it should be", found="; ".join(slow), fix="tell the administrators")


def amd(file: Path) -> Iterator[Finding]:
    """The findings in the file in which amdgpu counts memory errors: `ue: 0` and `ce: 0`."""
    try:
        found = re.search(r"^ue: ([0-9]{1,18})$", file.read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, ValueError):
        return
    if found and int(found[1]):
        yield Finding(
            "its memory had errors that ECC did not correct",
            where=str(file),
            found=f"{found[1]} since the driver was loaded",
            fix="if ranks fail on it, leave this node out (sbatch --exclude)",
        )


def _unfit(problem: str, found: str) -> Finding:
    return Finding(problem, wanted="memory without errors", found=found, fix=_UNFIT, code=exit_codes.UNFIT)
