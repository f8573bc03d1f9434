"""What a node offers, as /proc and the file systems show it. Host, runner and image check it by the same rule."""

from __future__ import annotations

import os
import resource

from dray.contract import exit_codes
from dray.contract.findings import Finding

SHARED_MEMORY = "/dev/shm"  # noqa: S108  its size alone is read
SCRATCH = "/tmp"  # noqa: S108  where compilers keep their caches
TOKENS = f"{SCRATCH}/dray-tokens-"  # and the user's number: where a node keeps tokens of datasets
OWN = f"{SCRATCH}/dray-"  # and the user's number, and what nobody can guess: a node's own folder of an attempt
_NVIDIA = "/proc/driver/nvidia/version"
_AMD = "/sys/module/amdgpu/version"  # of AMD's own packages; the kernel's own module has none
_LOCKED_GB = 1.0  # less than this, and the buffers of a few connections fill it


def has_gpu(accelerator: str) -> bool:
    """Whether this user may open a GPU here. A job's cgroup may still deny it: torch has the last word."""
    control = {"cuda": "/dev/nvidiactl", "rocm": "/dev/kfd"}.get(accelerator)
    return control is not None and os.access(control, os.R_OK | os.W_OK)


def nvidia_driver(version_file: str | os.PathLike[str] = _NVIDIA) -> str | None:
    """The kernel module's version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul ...`."""
    try:
        with open(version_file, encoding="utf-8") as file:
            fields = file.read().partition("Module")[2].split()
    except OSError:
        return None
    return next((field for field in fields if "." in field and field.replace(".", "").isdigit()), None)


def amdgpu_driver(version_file: str | os.PathLike[str] = _AMD) -> str | None:
    """The kernel module's version, such as 6.10.5."""
    try:
        with open(version_file, encoding="utf-8") as file:
            found = file.read().strip()
    except OSError:
        return None
    return found if found.replace(".", "").isdigit() else None


def driver(accelerator: str) -> str | None:
    """The version of the kernel module for these GPUs; none where nobody tells it."""
    return {"cuda": nvidia_driver, "rocm": amdgpu_driver}.get(accelerator, lambda: None)()


def older(version: str, than: str) -> bool:
    """Whether a driver is: 580 is as old as 580.0, and older than 580.65.06."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(".")]

    return numbers(version) < numbers(than)


def locked_memory(*, needed: bool, limit: int | None = None) -> Finding:
    """Whether network cards may register the ranks' memory (RDMA), which locks it; `needed` where they have to."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY or limit >= _LOCKED_GB * 1e9:
        return Finding("locked memory", found="unlimited" if limit < 0 else f"{limit / 1e9:.3f} GB", kind="ok")
    return Finding(
        "the limit of locked memory is too small for RDMA",
        wanted="unlimited (ulimit -l)",
        found=f"{limit / 1e9:.6f} GB",
        fix="PropagateResourceLimitsExcept=MEMLOCK in slurm.conf and LimitMEMLOCK=infinity for slurmd; elsewhere in "
        "/etc/security/limits.conf",
        code=exit_codes.UNFIT if needed else exit_codes.DONE,
    )


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
