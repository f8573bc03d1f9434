"""Checks of a node by /proc and its file systems, the same on the host, in the runner and in the image."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Sequence

from dray.contract import exit_codes
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
_NO_LIMIT = 1 << 60  # what cgroup v1 has in its place is a little less than 1 << 63


def has_gpu(accelerator: str) -> bool:
    """Whether this user may open a GPU here. A job's cgroup may still deny it, which only torch finds out."""
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
    """The version of the kernel module for these GPUs; None if it is unknown."""
    return {"cuda": nvidia_driver, "rocm": amdgpu_driver}.get(accelerator, lambda: None)()


def older(version: str, than: str) -> bool:
    """Whether a driver is older: 580 equals 580.0, and is older than 580.65.06."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(".")]

    return numbers(version) < numbers(than)


def image_for(accelerator: str, driver: str) -> str:
    """The image variant for a driver that is too old for the newest; empty if there is none."""
    variant, oldest = _OLDER_IMAGES[accelerator]
    return "" if older(driver, than=oldest) else variant


def locked_memory(*, needed: bool, limit: int | None = None) -> Finding:
    """Whether network cards may register, and so lock, the ranks' memory for RDMA; `needed`: the run requires it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
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
    if variable.startswith("GLOO"):
        missing = [one for one in named if one not in present]
    else:
        exact = value.startswith("=")
        fits = [one for one in named for own in present if own == one or (own.startswith(one) and not exact)]
        missing = [] if fits or value.startswith("^") else named
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
    size = status.f_frsize * status.f_blocks / 1e9
    fix = "docker run --shm-size=1g; elsewhere ask the administrators. Data workers and NCCL need this memory"
    problem = Finding(f"{path} is too small", wanted=f"{wanted_gb} GB (preflight.shared_memory_gb)", fix=fix)
    return _room(problem, path, size, wanted_gb)


def free_space(folder: str, wanted_gb: float) -> Finding:
    """Whether a folder has free space."""
    status = os.statvfs(folder)
    free = status.f_frsize * status.f_bavail / 1e9
    fix = "delete files in it, or leave this node out (sbatch --exclude)"
    problem = Finding(f"{folder} is full", wanted=f"{wanted_gb} GB free (preflight.free_gb)", fix=fix)
    return _room(problem, folder, free, wanted_gb)


def writable(folder: str) -> Finding:
    """Whether a file can be written there: a quota, a read-only mount or a bad disk may prevent it despite space."""
    path = f"{folder}/.check-{os.urandom(8).hex()}"  # containers may have the same name and number
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = bytes(_WRITTEN)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        finally:
            os.close(file)
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
    with open(meminfo, encoding="ascii") as file:
        found = re.search(r"^MemAvailable: +([0-9]+) kB$", file.read(), re.MULTILINE)
    available = int(found[1]) * 1024 / 1e9 if found else float("inf")
    limit = memory_limit(own, groups)
    allowed = float("inf") if limit is None else limit / 1e9
    fix = "other processes use the memory: leave this node out (sbatch --exclude)"
    what = "available"
    if allowed < available:
        fix, what = "ask Slurm for more: --mem=SIZE, or --mem=0 for all of a node's", "allowed by the job's cgroup"
    problem = Finding("the job has too little memory", wanted=f"{wanted_gb} GB (preflight.memory_gb)", fix=fix)
    size = _room(problem, "memory", min(available, allowed), wanted_gb)
    return size._replace(found=f"{size.found} {what}")


def memory_limit(own: str = "/proc/self/cgroup", groups: str = "/sys/fs/cgroup") -> int | None:
    """The lowest limit of this process's cgroups, in bytes; None if there is none, or none is visible."""
    limits = []
    try:
        with open(own, encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers not in ("", "memory"):
            continue
        top, name = (groups, "memory.max") if not controllers else (f"{groups}/memory", "memory.limit_in_bytes")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            try:
                with open("/".join([top, *parts[:depth], name]), encoding="ascii") as file:
                    text = file.read().strip()
            except OSError:  # the root has none, and a container may see its own part alone
                continue
            if text.isdigit() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def xids(path: str = _KERNEL_LOG) -> list[Finding]:
    """Errors of NVIDIA GPUs in the kernel's log since the machine started, if this user may read it."""
    seen: dict[tuple[str, int], None] = {}
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        while line := os.read(log, 8192):
            for bus, number in re.findall(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]{1,4})", line):
                seen[bus.decode(), int(number)] = None
    except OSError:  # its end, or a record that was overwritten
        pass
    finally:
        os.close(log)
    return [
        Finding(
            f"the kernel's log has Xid {number} of the GPU at {bus}",
            found=_XIDS[number],
            fix="if it happens again, leave this node out (sbatch --exclude), and tell the administrators",
        )
        for bus, number in seen
        if number in _XIDS
    ]


def _room(problem: Finding, path: str, found_gb: float, wanted_gb: float) -> Finding:
    found = f"{found_gb:.3f} GB"
    if found_gb >= wanted_gb:
        return Finding(path, found=found, kind="ok")
    return problem._replace(found=found, code=exit_codes.UNFIT)
