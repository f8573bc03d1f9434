"""What this machine has for a run, what is wrong with it, and the fix."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from dray import __version__, process
from dray.config import dray_home, mirrors, sites
from dray.config.image_definition import ACCELERATORS
from dray.config.recipe import Preflight
from dray.contract import exit_codes, node
from dray.contract.findings import DrayError, Finding, counted, listed
from dray.fitness import network_and_site
from dray.images import store
from dray.runs import slurm

_ENGINES = ("apptainer", "singularity", "docker", "podman", "enroot", "podman-hpc")
_BY_VERB = ("enroot", "podman-hpc")  # they have no --version
_ANSWER_S = 30.0  # a program on a network disk that does not answer is a finding, not a wait
# Slurm's plugins that start containers, by the option that each adds to srun.
_PLUGINS = {"--environment": "edf, CSCS's Container Engine", "--container-image": "Pyxis"}


def check(chosen: sites.Choice) -> list[Finding]:
    """All findings on this machine; with a site file, also what the site expects of its nodes."""
    defaults = Preflight()
    return [
        *_machine(),
        *_engines(),
        *_slurm(),
        *_gpus(),
        _fabric(),
        node.shared_memory(defaults.shared_memory_gb),
        node.free_space(node.SCRATCH, defaults.free_gb),
        _hf_home(),
        *_images(),
        *mirror_table(),
        *_site(chosen),
    ]


def _ok(subject: str, found: str) -> Finding:
    return Finding(subject, found=found, kind="ok")


def _note(subject: str, found: str, fix: str = "") -> Finding:
    return Finding(subject, found=found, fix=fix, kind="note")


def _unfit(subject: str, found: str, fix: str = "") -> Finding:
    return Finding(subject, found=found, fix=fix, code=exit_codes.UNFIT)


def _machine() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cpus = counted(len(os.sched_getaffinity(0)), "CPU")
    yield _ok("machine", f"{socket.gethostname()}, {platform.machine()}, {cpus}, {memory:.0f} GB")
    yield _ok("dray", f"{__version__}, Python {platform.python_version()} ({sys.executable})")


def _engines() -> Iterator[Finding]:
    installed = [name for name in _ENGINES if process.which(name)]
    for name in installed:
        yield _engine(name, alone=len(installed) == 1)
    help_ = process.run(["srun", "--help"], check=False).out if process.which("srun") else ""
    plugins = [option for option in _PLUGINS if option in help_]
    for option in plugins:
        yield _ok("engine", f"{_PLUGINS[option]} (srun has {option})")
    if not installed and not plugins:
        fix = "load the site's module (apptainer, singularity); on your own machine install Docker or Podman"
        yield _unfit("engine", f"none of {', '.join(_ENGINES)} is on PATH", fix)
    if process.apptainer() and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        fix = "ask the administrators for /dev/fuse: without it every start unpacks the image"
        yield _note("engine", "this user may not open /dev/fuse", fix)


def _engine(name: str, *, alone: bool) -> Finding:
    """Its version; `docker --version` alone works for everybody, so that Docker is also reached."""
    try:
        done = process.run([name, "version" if name in _BY_VERB else "--version"], check=False, seconds=_ANSWER_S)
    except DrayError as error:
        return _unfit("engine", error.problem, error.finding.fix)
    version = " ".join([name, *(done.out or done.err).strip().splitlines()[:1]])
    if done.code:
        return _unfit("engine", version)
    if name == "docker":
        from dray.clients import docker  # noqa: PLC0415  the SDK, which only a machine with Docker need load

        try:
            docker.client().close()
        except DrayError as error:
            level = _unfit if alone else _note  # another engine does without Docker's
            return level("engine", f"{version}; {error.problem}", error.finding.fix)
    return _ok("engine", version)


def _slurm() -> Iterator[Finding]:
    if not process.which("sbatch"):
        fix = "dray run works without Slurm; make cluster starts one on this machine"
        yield _note("Slurm", "sbatch is not on PATH", fix)
        return
    try:
        partitions = slurm.partitions()
    except DrayError as error:
        fix = "run scontrol ping; is this machine a login node of the cluster?"
        yield _unfit("Slurm", error.details.get("found", "sinfo does not answer"), fix)
        return
    version = process.run(["sbatch", "--version"], check=False).out.strip()
    names = listed(partition.name for partition in partitions)
    yield _ok("Slurm", f"{version}, cluster {slurm.cluster_name() or '(no name)'}, partitions {names}")


def _gpus() -> Iterator[Finding]:
    driver = node.nvidia_driver()
    identities = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    amd = [path for path in identities if node.proc_text(path).strip() not in ("", "0")]  # a CPU has 0
    if driver:
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        yield _ok("GPU", f"{count} from NVIDIA, driver {driver}")
    if amd and node.has_gpu("rocm"):
        yield _ok("GPU", f"{len(amd)} from AMD, driver {node.amdgpu_driver() or 'of the kernel'}")
    elif amd:
        fix = "join the group of /dev/kfd (render or video)"
        yield _unfit("GPU", f"{len(amd)} from AMD, and this user may not open /dev/kfd", fix)
    if not amd and not driver:
        yield _note("GPU", "none (a login node has none either)")


def _fabric() -> Finding:
    devices = " ".join(network_and_site.devices())
    interfaces = " ".join(network_and_site.interfaces()) or "none"
    found = f"{devices or 'no Slingshot and no InfiniBand device'}; interfaces {interfaces}"
    return (_ok if devices else _note)("fabric", found)


def _hf_home() -> Finding:
    folder = os.environ.get("HF_HOME")
    if not folder:
        fix = "export HF_HOME=FOLDER, a folder on a disk that all nodes share, before you submit"
        found = "is not set: dray takes ~/.cache/huggingface if it exists, else .cache-UID beside the runs"
        return _note("HF_HOME", found, fix)
    if not os.access(folder, os.W_OK):
        return _unfit("HF_HOME", f"this user cannot write {folder}", "set it to a writable folder that all nodes share")
    return _ok("HF_HOME", folder)


def _images() -> Iterator[Finding]:
    try:
        root = dray_home.root()
    except DrayError as error:
        yield error.finding._replace(code=exit_codes.UNFIT)
        return
    images = {name: store.sif(root, name) for name in ACCELERATORS}
    images |= {name: store.adopted(root, name) for name in store.adopted_names(root)}
    present = [f"{name}: {file.resolve()}" for name, file in images.items() if file.exists()]
    for image in present:
        yield _ok("image", image)
    if not present:
        fix = "make image-cpu (or -cuda, -cuda12, -rocm, -rocm6), or copy one to build/"
        yield _note("image", f"none in {root / 'build'}", fix)


def mirror_table() -> Iterator[Finding]:
    """The mirrors that dray contacts instead of registries and indexes, when it builds or adopts an image."""
    try:
        table = mirrors.table()
    except DrayError as error:
        yield error.finding._replace(code=exit_codes.UNFIT)
        return
    for name, mirror in table.items():
        yield _ok("mirror", f"{name} -> {mirror} ({mirrors.path()})")


def _site(chosen: sites.Choice) -> Iterator[Finding]:
    site = chosen.site
    if site.name == sites.GENERIC:
        yield _note("site", chosen.reason, "dray site new writes a site file for this machine")
        return
    yield _ok("site", f"{site.name}: {chosen.reason}")
    for bind in site.binds:
        path = os.path.expandvars(bind.path)
        if "$" in path or not Path(path).exists():
            level = _unfit if bind.required else _note
            yield level("bind", f"{bind.path} does not exist ({bind.why})")
    if site.interfaces and not {*site.interfaces} & {*network_and_site.interfaces()}:
        fix = "run dray doctor on a compute node; if it says the same there, correct interfaces in the site file"
        yield _unfit("interface", f"this machine has none of {', '.join(site.interfaces)}", fix)
    if site.fabric.strategy == "host":
        for pattern in site.fabric.files:
            if not list(Path("/").glob(pattern.lstrip("/"))):
                found = f"{pattern} does not exist: ranks would fall back to TCP"
                yield _unfit("library", found, f"correct the site file (dray site show {site.name})")
    cpus = os.cpu_count()
    if site.cpus_per_node and cpus != site.cpus_per_node:
        found = f"{cpus} on this machine, {site.cpus_per_node} on a node of the site"
        yield _note("CPUs", found, "run dray doctor on a compute node of that partition")
