"""Collects evidence that is gone soon after a failure: memory, kernel log, disks, torch's message about GPU memory.

Each line goes into the failure's record. It takes some milliseconds, and only after a failure.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Iterator

from dray.contract import node
from dray.contract.findings import RetryError

BEFORE = "DRAY_OOM_KILLS"  # what `oom_kills` was before the launcher was started
_MOST, _LONGEST = 12, 600
_LOG, _KERNEL_LOG = 1 << 16, 1 << 18  # bytes from their ends
_SOON_S, _DRIFT = 60.0, 5e-5  # before the start; and of the clock of the kernel's log, which NTP does not set
_READ_ALL = 3  # SYSLOG_ACTION_READ_ALL of syslog(2), which dmesg uses too
_STAMP = re.compile(r"(?:<\d{1,4}>)?\[ {0,6}(\d{1,10}\.\d{6})\]")
_OWNER = re.compile(r"(?:\buid=|UID:)(\d{1,10})")
_TELLING = re.compile(
    r"oom-kill:|out of memory: Killed|NVRM: Xid|NVRM: .{0,80}fallen off|Hardware Error|EDAC .{0,40}\bUE\b"
    r"|: segfault at |amdgpu.{0,120}(?:GPU reset|page fault|RAS|ring .{0,40}timeout)|I/O error"
    r"|nfs: server .{1,80} not responding",
    re.IGNORECASE,
)
_KILL = re.compile("oom-kill|out of memory", re.IGNORECASE)
_HELD = re.compile(r"[A-Z]{2,4} out of memory\. Tried to allocate")
_WORKER = re.compile(r"DataLoader worker \(pid[^)]{0,80}\) is killed by signal: ")


def collect(folder: str, log: object) -> list[str]:
    """At most twelve lines of evidence; what cannot be read is left out."""
    looks: tuple[Callable[[], list[str]], ...] = (
        lambda: _logged(log),
        _memory,
        _image,
        lambda: _disks(folder),
        _kernel,
    )
    found: list[str] = []
    for look in looks:
        try:
            found += look()
        except Exception:  # noqa: S112  no defect of this may hide the failure itself
            continue
    return [line[:_LONGEST] for line in found[:_MOST]]


def oom_kills() -> str:
    """How many processes of this node's memory cgroup the kernel has killed; empty if unknown."""
    for path in _groups():
        if found := re.search(r"(?m)^oom_kill (\d{1,19})$", _read(path)):
            return found[1]
    return ""


def _groups() -> Iterator[str]:
    """The files that may have the counter: of this process's own cgroup, or of the root that a container sees."""
    for line in _read("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        kinds, _, group = rest.partition(":")
        if "memory" in kinds.split(","):
            for path in dict.fromkeys((group.rstrip("/"), "")):
                yield f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        elif number == "0" and not kinds:
            for path in dict.fromkeys((group.rstrip("/"), "")):
                yield f"/sys/fs/cgroup{path}/memory.events"


def _killed() -> int | None:
    """How many were killed since the ranks were started; None if unknown."""
    before, after = os.environ.get(BEFORE, ""), oom_kills()
    return int(after) - int(before) if before.isdigit() and after else None


def _memory() -> list[str]:
    if (killed := _killed() or 0) <= 0:
        return []
    limit = next(filter(None, map(_limit, _groups())), "")
    return [f"memory cgroup: oom_kill rose by {killed} since the ranks were started{limit}"]


def _limit(path: str) -> str:
    """The memory limit of the cgroup with this counter, or of one above it."""
    folder, name = os.path.split(path)
    if name == "memory.oom_control":
        found = re.search(r"(?m)^hierarchical_memory_limit (\d{1,19})$", _read(f"{folder}/memory.stat"))
        limits = [int(found[1])] if found else []
    else:
        folders = [folder]
        while len(folder) > len("/sys/fs/cgroup"):
            folders.append(folder := os.path.dirname(folder))
        limits = [int(text) for one in folders if (text := _read(f"{one}/memory.max").strip()).isdigit()]
    limits = [limit for limit in limits if limit < 1 << 60]  # v1 has a number for none
    return f"; its limit is {min(limits) / 1e9:.3f} GB" if limits else ""


def require_image(node: str) -> None:
    """Raise RetryError if the image's mount is gone, for example by a signal to all processes of the job."""
    for found in _image():
        raise RetryError(
            "the image's mount has gone away",
            wanted="a mounted image, in which the ranks start again",
            found=found,
            fix="submit again, or set max_requeues; docs/survive.md says which signals leave the mount alone",
            node=node,
        )


def _image() -> list[str]:
    """The error of a mount that has gone away under the ranks."""
    try:
        os.stat(sys.executable)
    except OSError as error:
        return [f"the image cannot be read any more: {error.strerror}: {sys.executable}"]
    return []


def _disks(folder: str) -> list[str]:
    found = []
    for name, path in (("disk of the run folder", folder), (node.SHARED_MEMORY, node.SHARED_MEMORY)):
        try:
            disk = os.statvfs(path)
        except OSError as error:
            found.append(f"{name}: {error.strerror}")
            continue
        free, whole = (blocks * disk.f_frsize / 1e9 for blocks in (disk.f_bavail, disk.f_blocks))
        none = ", and no inode is free" if disk.f_files and not disk.f_favail else ""
        found.append(f"{name}: {free:.3f} GB free of {whole:.3f} GB{none}")
    return found


def _kernel() -> list[str]:
    """Lines about memory, GPUs and disks since this process was started, where this user may read them."""
    buffer = ctypes.create_string_buffer(_KERNEL_LOG)
    size = ctypes.CDLL(None).klogctl(_READ_ALL, buffer, _KERNEL_LOG)
    now, hertz = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    began = int(_read("/proc/self/stat").rpartition(")")[2].split()[19]) / hertz
    oldest = began - _SOON_S - now * _DRIFT
    own, others = _outside(os.getuid()), _killed() == 0
    found = []
    for line in buffer.raw[: max(size, 0)].decode("utf-8", "replace").splitlines():
        stamp, owner = _STAMP.match(line), _OWNER.search(line)
        if not stamp or float(stamp[1]) < oldest or (owner and int(owner[1]) != own):
            continue
        told = _TELLING.search(line[:2000])
        if told and not (others and _KILL.match(told[0])):  # else it was a process of another job
            found.append(f"kernel log: {line[line.index('[') :]}")
    return found[-6:]


def _outside(uid: int) -> int:
    """This user's number in the kernel's log, which knows no user namespace."""
    for line in _read("/proc/self/uid_map").splitlines():
        inside, outside, count = map(int, line.split())
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


def _logged(log: object) -> list[str]:
    """How full the GPU was, and what killed a data worker: torch says more after it than a record's last lines hold."""
    with open(str(log), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG))
        lines = file.read().decode("utf-8", "replace").splitlines()
    told = []
    for name, pattern in (("GPU memory", _HELD), ("log", _WORKER)):
        told += [f"{name}: {line[found.start() :]}" for line in lines if (found := pattern.search(line[:2000]))][-1:]
    return told


def _read(path: str) -> str:
    """Of /proc or /sys; empty where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
