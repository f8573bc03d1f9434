"""What a node offers, as /proc and the file systems show it. Host, runner and image check it by the same rule."""

from __future__ import annotations

import os

from dray.contract import exit_codes
from dray.contract.findings import Finding

SHARED_MEMORY = "/dev/shm"  # noqa: S108  its size alone is read
SCRATCH = "/tmp"  # noqa: S108  where compilers keep their caches
TOKENS = f"{SCRATCH}/dray-tokens-"  # and the user's number: where a node keeps tokens of datasets
OWN = f"{SCRATCH}/dray-"  # and the user's number, and what nobody can guess: a node's own folder of an attempt
_NVIDIA = "/proc/driver/nvidia/version"


def nvidia_driver(version_file: str | os.PathLike[str] = _NVIDIA) -> str | None:
    """The kernel module's version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul ...`."""
    try:
        with open(version_file, encoding="utf-8") as file:
            fields = file.read().partition("Module")[2].split()
    except OSError:
        return None
    return next((field for field in fields if "." in field and field.replace(".", "").isdigit()), None)


def shared_memory(wanted_gb: float, path: str = SHARED_MEMORY) -> Finding:
    """Whether data workers and NCCL have room to share memory."""
    status = os.statvfs(path)
    size = status.f_frsize * status.f_blocks / 1e9
    fix = "docker run --shm-size=1g; elsewhere ask the administrators. Data workers and NCCL share memory in it"
    problem = Finding(f"{path} is too small", wanted=f"{wanted_gb} GB (preflight.shared_memory_gb)", fix=fix)
    return _room(problem, path, size, wanted_gb)


def free_space(folder: str, wanted_gb: float) -> Finding:
    """Whether a folder has room."""
    status = os.statvfs(folder)
    free = status.f_frsize * status.f_bavail / 1e9
    fix = "remove what is not needed in it, or leave this node out (sbatch --exclude)"
    problem = Finding(f"{folder} is full", wanted=f"{wanted_gb} GB free (preflight.free_gb)", fix=fix)
    return _room(problem, folder, free, wanted_gb)


def _room(problem: Finding, path: str, found_gb: float, wanted_gb: float) -> Finding:
    found = f"{found_gb:.3f} GB"
    if found_gb >= wanted_gb:
        return Finding(path, found=found, kind="ok")
    return problem._replace(found=found, code=exit_codes.UNFIT)
