"""What this machine has for a run, what is wrong with it, and the fix."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dray import __version__, process
from dray.config import checkout
from dray.config.image import ACCELERATORS
from dray.config.site import Site
from dray.contract.findings import DrayError
from dray.images import store
from dray.runs import submit

_ENGINES = ("apptainer", "singularity", "docker", "podman", "enroot")
_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line: good, worth knowing, or wrong with its fix."""

    about: str
    state: Literal["ok", "note", "wrong"]
    found: str
    fix: str = ""


def look(site: Site | None, why: str) -> list[Item]:
    """Everything; with a site, also what it says of its nodes."""
    of_machine = [*_machine(), *_engines(), *_slurm(), *_gpus(), *_fabric(), *_room(), *_caches(), *_images()]
    return [*of_machine, *_site(site, why)]


def _machine() -> Iterator[Item]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    has = f"{socket.gethostname()}, {platform.machine()}, {cores} CPUs, {memory:.0f} GB, Linux {platform.release()}"
    yield Item(about="machine", state="ok", found=has)
    yield Item(about="dray", state="ok", found=f"{__version__}, Python {platform.python_version()} ({sys.executable})")


def _engines() -> Iterator[Item]:
    found = [name for name in _ENGINES if process.which(name)]
    for name in found:
        done = process.run([name, "version"] if name == "enroot" else [name, "--version"], check=False)
        said = (done.out or done.err).strip().splitlines()[:1]
        yield Item(about="engine", state="ok" if done.code == 0 else "wrong", found=" ".join([name, *said]))
    if not found:
        fix = "load the site's module (apptainer, singularity); on a desk install Docker or Podman"
        yield Item(about="engine", state="wrong", found=f"none of {', '.join(_ENGINES)} is on PATH", fix=fix)
    if {"apptainer", "singularity"} & set(found):
        yield from _unprivileged()


def _unprivileged() -> Iterator[Item]:
    limit = Path("/proc/sys/user/max_user_namespaces")
    if limit.exists() and limit.read_text(encoding="ascii").strip() == "0":
        fix = "an administrator must allow user namespaces, or install Apptainer with setuid"
        yield Item(about="engine", state="wrong", found="user namespaces are off (max_user_namespaces is 0)", fix=fix)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        fix = "without it a SIF is unpacked at every start: ask the administrators for /dev/fuse"
        yield Item(about="engine", state="note", found="/dev/fuse may not be opened", fix=fix)


def _slurm() -> Iterator[Item]:
    if not process.which("sbatch"):
        fix = "dray run works without it; make cluster brings up a real one here"
        yield Item(about="Slurm", state="note", found="sbatch is not on PATH", fix=fix)
        return
    version = process.run(["sbatch", "--version"], check=False)
    answers = process.run(["sinfo", "--noheader", "--format=%P %D nodes %c CPUs %G"], check=False)
    if answers.code:
        fix = "see scontrol ping; is this machine a login node of the cluster?"
        yield Item(about="Slurm", state="wrong", found=answers.err.strip() or "sinfo does not answer", fix=fix)
        return
    yield Item(about="Slurm", state="ok", found=f"{version.out.strip()}, cluster {submit.cluster() or '(no name)'}")
    for line in sorted(set(answers.out.splitlines()))[:12]:
        yield Item(about="partition", state="ok", found=" ".join(line.split()))


def _gpus() -> Iterator[Item]:
    nvidia = sorted(Path("/dev").glob("nvidia[0-9]*"))
    amd = [path for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id") if _is_gpu(path)]
    if _NVIDIA.exists():
        version = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", _NVIDIA.read_text(encoding="utf-8"))
        yield Item(about="GPU", state="ok", found=f"{len(nvidia)} of NVIDIA, driver {version[1] if version else '?'}")
    if amd:
        open_ = os.access("/dev/kfd", os.R_OK | os.W_OK)
        fix = "" if open_ else "join the group of /dev/kfd (render or video)"
        yield Item(about="GPU", state="ok" if open_ else "wrong", found=f"{len(amd)} of AMD", fix=fix)
    if not amd and not _NVIDIA.exists():
        yield Item(about="GPU", state="note", found="none (a login node has none either)")


def _is_gpu(identity: Path) -> bool:
    try:
        return identity.read_text(encoding="ascii").strip() not in ("", "0")
    except OSError:  # a GPU of another job's
        return False


def _fabric() -> Iterator[Item]:
    devices = [*Path("/dev").glob("cxi[0-9]*"), *Path("/sys/class/infiniband").glob("*")]
    names = sorted(path.name for path in devices)
    # Links with a device of their own: no bridges, and no ends of containers' wires.
    links = sorted(path.parent.name for path in Path("/sys/class/net").glob("*/device"))
    found = f"{' '.join(names) or 'no Slingshot and no InfiniBand device'}; interfaces {' '.join(links) or 'none'}"
    yield Item(about="fabric", state="ok" if names else "note", found=found)


def _room() -> Iterator[Item]:
    shm = shutil.disk_usage("/dev/shm").total / 1e9  # noqa: S108  its size alone is looked at
    fix = "" if shm >= 0.5 else "data workers and NCCL share memory there (docker run --shm-size=1g)"
    yield Item(about="shared memory", state="wrong" if fix else "ok", found=f"{shm:.2f} GB in /dev/shm", fix=fix)
    free = shutil.disk_usage("/tmp").free / 1e9  # noqa: S108  where compilers' caches go
    fix = "" if free >= 1 else "compilers' caches and copies of the image go there"
    yield Item(about="node's disk", state="wrong" if fix else "ok", found=f"{free:.1f} GB free in /tmp", fix=fix)


def _caches() -> Iterator[Item]:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    if not os.environ.get("HF_HOME"):
        fix = "export HF_HOME to a folder on a disk that all nodes share, before you submit"
        yield Item(about="HF_HOME", state="note", found="is not set; a container does not see your home", fix=fix)
    elif not os.access(home, os.W_OK):
        fix = "a folder that you may write, on a disk that all nodes share"
        yield Item(about="HF_HOME", state="wrong", found=f"{home} cannot be written", fix=fix)
    else:
        yield Item(about="HF_HOME", state="ok", found=str(home))


def _images() -> Iterator[Item]:
    try:
        root = checkout.root()
    except DrayError as error:
        yield Item(about="checkout", state="wrong", found=error.problem, fix=error.details.get("fix", ""))
        return
    there = [variant for variant in ACCELERATORS if store.sif(root, variant).exists()]
    for variant in there:
        file = store.sif(root, variant)
        yield Item(about="image", state="ok", found=f"{variant}: {file} ({file.stat().st_size / 1e6:.0f} MB)")
    if not there:
        fix = "make image-cpu (or -cuda, -cuda12, -rocm), or copy one to build/"
        yield Item(about="image", state="note", found=f"none in {root / 'build'}", fix=fix)


def _site(site: Site | None, why: str) -> Iterator[Item]:
    if site is None:
        yield Item(about="site", state="note", found=why, fix="dray site new writes a file from what it sees here")
        return
    yield Item(about="site", state="ok", found=f"{site.name}: {why}")
    for bind in site.binds:
        path = os.path.expandvars(bind.path)
        if "$" in path or not Path(path).exists():
            found = f"{bind.path} is not here ({bind.why})"
            yield Item(about="bind", state="wrong" if bind.required else "note", found=found)
    if site.interfaces and not any(Path("/sys/class/net", name).exists() for name in site.interfaces):
        found = f"none of {', '.join(site.interfaces)} is here"
        yield Item(about="interface", state="wrong", found=found, fix="on a compute node this must be one of its own")
    for pattern in (*site.fabric.libraries, *([site.fabric.plugin] if site.fabric.plugin else [])):
        if site.fabric.strategy == "host" and not list(Path("/").glob(pattern.lstrip("/"))):
            found = f"{pattern} is not here: ranks would fall back to TCP"
            yield Item(about="library", state="wrong", found=found, fix="correct the site's file (dray site show)")
    cpus = os.cpu_count() or 0
    if site.cpus_per_node and cpus != site.cpus_per_node:
        found = f"{cpus} here, and the site's nodes have {site.cpus_per_node}"
        yield Item(about="CPUs", state="note", found=found, fix="is this a compute node of that partition?")
