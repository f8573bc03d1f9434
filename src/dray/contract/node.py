"""Checks of a node by /proc and its file systems, the same on the host, in the runner and in the image."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Sequence
from contextlib import suppress

from dray.contract import exit_codes
from dray.contract.files import AnyPath
from dray.contract.findings import Finding

SHARED_MEMORY = "/dev/shm"  # noqa: S108  its size alone is read
SCRATCH = "/tmp"  # noqa: S108  where compilers keep their caches
TOKENS = f"{SCRATCH}/dray-tokens-"  # and the user's number: where a node keeps tokens of datasets
OWN = f"{SCRATCH}/dray-"  # and the user's number, and what nobody can guess: a node's own folder of an attempt
_NVIDIA = "/proc/driver/nvidia/version"
_AMD = "/sys/module/amdgpu/version"  # of AMD's own packages; the kernel's own module has none
_KERNEL_LOG = "/dev/kmsg"  # mostly root's alone
# The image for older drivers, and the oldest that it runs with, which its image.toml explains.
_OLDER_IMAGES = {"cuda": ("cuda12", "525.60.13"), "rocm": ("rocm6", "6.7")}
# NVIDIA's numbers of errors after which a GPU needs a reset or a repair; most others are a program's own fault.
_XIDS = {
    48: "a double-bit ECC error",
    64: "a row of its memory could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    95: "an uncontained ECC error",
    119: "its system processor (GSP) does not answer",
    120: "an error of its system processor (GSP)",
}
_LOCKED_GB = 1.0  # less than this, and the buffers of a few connections fill it
_WRITTEN = 65536  # bytes
_LONGEST = 1 << 14  # bytes: the first processor's part of /proc/cpuinfo; a large node's has a megabyte
_NO_LIMIT = 1 << 60  # what cgroup v1 has in its place is a little less than 1 << 63


def has_gpu(accelerator: str) -> bool:
    """Whether this user may open a GPU here. A job's cgroup may still deny it, which only torch finds out."""
    control = {"cuda": "/dev/nvidiactl", "rocm": "/dev/kfd"}.get(accelerator)
    return control is not None and os.access(control, os.R_OK | os.W_OK)


def proc_text(path: AnyPath) -> str:
    """The beginning of a file of /proc or /sys; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST)
    except OSError:
        return ""


def nvidia_driver(version_file: AnyPath = _NVIDIA) -> str | None:
    """The kernel module's version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul ...`."""
    version = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", proc_text(version_file) + "\n")
    return version[1] if version else None


def amdgpu_driver(version_file: AnyPath = _AMD) -> str | None:
    """The kernel module's version, such as 6.10.5."""
    version = re.fullmatch(r"[\d.]*\d[\d.]*", proc_text(version_file).strip())
    return version[0] if version else None


def driver(accelerator: str) -> str | None:
    """The version of the kernel module for these GPUs; None if it is unknown."""
    return {"cuda": nvidia_driver, "rocm": amdgpu_driver}.get(accelerator, lambda: None)()


def older(version: str, than: str) -> bool:
    """Whether a driver is older: 580 equals 580.0, and is older than 580.65.06."""
    first, second = ([int(part) for part in text.split(".")] for text in (version, than))
    return first < second


def image_for(accelerator: str, driver: str) -> str:
    """The image variant for a driver that is too old for the newest; empty if there is none."""
    variant, oldest = _OLDER_IMAGES[accelerator]
    return "" if older(driver, than=oldest) else variant


def locked_memory(*, needed: bool) -> Finding:
    """Whether network cards may register, and so lock, the ranks' memory for RDMA; `needed`: the run requires it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= _LOCKED_GB * 1e9:
        return Finding("locked memory", found="unlimited" if limit < 0 else f"{limit / 1e9:.3f} GB", kind="ok")
    return Finding(
        "the limit of locked memory is too small for RDMA",
        wanted="unlimited (ulimit -l)",
        found=f"{limit / 1e9:.6f} GB",
        fix="ask the administrators: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf and LimitMEMLOCK=infinity for "
        "slurmd; without Slurm, memlock in /etc/security/limits.conf",
        code=exit_codes.UNFIT if needed else exit_codes.DONE,
    )


def interfaces(variable: str, value: str, present: Sequence[str]) -> Finding:
    """Whether a network variable names interfaces of this node: all of them for gloo, a prefix for NCCL and RCCL.

    With a wrong one every rank fails, in words that name no variable.
    """
    named = value.removeprefix("=").split(",")
    missing = [name for name in named if name not in present]
    if not variable.startswith("GLOO"):
        begins = () if value.startswith("=") else tuple(named)
        if len(missing) < len(named) or value.startswith("^") or any(own.startswith(begins) for own in present):
            missing = []
    if not missing:
        return Finding(variable, found=value, kind="ok")
    return Finding(
        f"{variable}={value} names no network interface of this node",
        wanted=f"an interface of this node: {' '.join(present)}",
        found=" ".join(missing),
        fix=f"leave out {variable}, or name one of these (env.{variable} in the recipe, or the site's file)",
        code=exit_codes.UNFIT,
    )


def shared_memory(wanted_gb: float, path: str = SHARED_MEMORY) -> Finding:
    """Whether data workers and NCCL have room to share memory."""
    status = os.statvfs(path)
    size = status.f_frsize * status.f_blocks
    fix = "docker run --shm-size=1g; elsewhere ask the administrators. Data workers and NCCL need this memory"
    problem = Finding(f"{path} is too small", wanted=f"{wanted_gb} GB (preflight.shared_memory_gb)", fix=fix)
    return _room(path, problem, size, wanted_gb)


def free_space(folder: str, wanted_gb: float) -> Finding:
    """Whether a folder has free space."""
    status = os.statvfs(folder)
    free = status.f_frsize * status.f_bavail
    fix = "delete files in it, or leave this node out (sbatch --exclude)"
    problem = Finding(f"{folder} is full", wanted=f"{wanted_gb} GB free (preflight.free_gb)", fix=fix)
    return _room(folder, problem, free, wanted_gb)


def writable(folder: str) -> Finding:
    """Whether a file can be written there: a quota, a read-only mount or a bad disk may prevent it despite space."""
    path = f"{folder}/.check-{os.urandom(8).hex()}"  # containers may have the same name and number
    try:
        with open(path, "xb") as file:
            try:
                file.write(bytes(_WRITTEN))
                file.flush()
                os.fsync(file.fileno())
            finally:
                os.unlink(path)
    except OSError as error:
        return Finding(
            f"this node cannot write in {folder}",
            wanted="permission and space to write a file",
            found=error.strerror or str(error),
            fix="check quota and mount; if other nodes can write there, leave this one out (sbatch --exclude)",
            code=exit_codes.UNFIT,
        )
    return Finding(folder, found="can be written", kind="ok")


def memory(
    wanted_gb: float,
    meminfo: str = "/proc/meminfo",
    own: str = "/proc/self/cgroup",
    groups: str = "/sys/fs/cgroup",
) -> Finding:
    """Whether the job has enough memory here: available, and allowed by Slurm's cgroup."""
    available = re.search(r"^MemAvailable: +([0-9]+) kB$", proc_text(meminfo), re.MULTILINE)
    size, what, fix = min(
        (
            int(available[1]) * 1024 if available else _NO_LIMIT,
            "available",
            "other processes use the memory: leave this node out (sbatch --exclude)",
        ),
        (
            memory_limit(own, groups),
            "allowed by the job's cgroup",
            "ask Slurm for more: --mem=SIZE, or --mem=0 for all of a node's",
        ),
    )
    problem = Finding("the job has too little memory", wanted=f"{wanted_gb} GB (preflight.memory_gb)", fix=fix)
    room = _room("memory", problem, size, wanted_gb)
    return room._replace(found=f"{room.found} {what}")


def memory_limit(own: str = "/proc/self/cgroup", groups: str = "/sys/fs/cgroup") -> int:
    """The lowest limit of this process's cgroups, in bytes; _NO_LIMIT if there is none, or none is visible."""
    limits = [_NO_LIMIT]
    for controllers, path in re.findall(r"^\d+:(.*?):(/.*)$", proc_text(own), re.MULTILINE):
        if controllers in ("", "memory"):
            top, name = (f"{groups}/memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
            parts = path.strip("/").split("/")
            # The root has none, and a container may see its own part alone.
            texts = (proc_text("/".join([top, *parts[:depth], name])).strip() for depth in range(len(parts) + 1))
            limits += [int(text) for text in texts if text.isdigit()]
    return min(limits)


def xids(path: str = _KERNEL_LOG) -> list[Finding]:
    """Errors of NVIDIA GPUs in the kernel's log since the machine started, if this user may read it."""
    log = b""
    with (
        suppress(OSError),  # nor is it all there, where a record was overwritten
        open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file,
    ):
        while record := file.read(8192):
            log += record
    seen = dict.fromkeys(re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]+)", log.decode(errors="replace")))
    return [
        Finding(
            f"the kernel's log has Xid {number} of the GPU at {bus}",
            found=_XIDS[int(number)],
            fix="if it happens again, leave this node out (sbatch --exclude), and tell the administrators",
        )
        for bus, number in seen
        if int(number) in _XIDS
    ]


def _room(name: str, problem: Finding, size: int, wanted_gb: float) -> Finding:
    """The problem, or how much room is there if that is enough."""
    found = f"{size / 1e9:.3f} GB"
    if size >= wanted_gb * 1e9:
        return Finding(name, found=found, kind="ok")
    return problem._replace(found=found, code=exit_codes.UNFIT)
