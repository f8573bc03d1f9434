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
from dray.config.site import Site
from dray.contract import exit_codes, node
from dray.contract.findings import DrayError, Finding, counted
from dray.fitness import host
from dray.images import store
from dray.runs import slurm

_ENGINES = ("apptainer", "singularity", "docker", "podman", "enroot", "podman-hpc")
_BY_VERB = {"enroot", "podman-hpc"}  # they have no --version
_ANSWER_S = 30.0  # a program on a network disk that does not answer is a finding, not a wait
# Slurm's plugins that start containers, by the option that each adds to srun.
_PLUGINS = {"--environment": "edf, CSCS's Container Engine", "--container-image": "Pyxis"}


def check(chosen: sites.Choice) -> list[Finding]:
    """All findings on this machine; with a site file, also what the site expects of its nodes."""
    of_machine = [*_machine(), *_engines(), *_slurm(), *_gpus(), *_network(), *_room(), *_hf_home(), *_images()]
    return [*of_machine, *mirror_table(), *_site(chosen)]


def _ok(subject: str, found: str) -> Finding:
    return Finding(subject, found=found, kind="ok")


def _note(subject: str, found: str, fix: str = "") -> Finding:
    return Finding(subject, found=found, fix=fix, kind="note")


def _unfit(subject: str, found: str, fix: str = "") -> Finding:
    return Finding(subject, found=found, fix=fix, code=exit_codes.UNFIT)


def _machine() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.machine()}, {counted(cores, 'CPU')}, {memory:.0f} GB, Linux {platform.release()}"
    yield _ok("machine", f"{socket.gethostname()}, {system}")
    yield _ok("dray", f"{__version__}, Python {platform.python_version()} ({sys.executable})")


def _engines() -> Iterator[Finding]:
    installed = [name for name in _ENGINES if process.which(name)]
    engines = {name: _engine(name, alone=installed == [name]) for name in installed}
    yield from engines.values()
    help_ = process.run(["srun", "--help"], check=False).out if process.which("srun") else ""
    plugins = [_ok("engine", f"{plugin} (srun has {option})") for option, plugin in _PLUGINS.items() if option in help_]
    yield from plugins
    if not installed and not plugins:
        fix = "load the site's module (apptainer, singularity); on your own machine install Docker or Podman"
        yield _unfit("engine", f"none of {', '.join(_ENGINES)} is on PATH", fix)
    if {"apptainer", "singularity"} & engines.keys():
        yield from _unprivileged()
    if any(name in ("apptainer", "singularity") and not engine.code for name, engine in engines.items()):
        yield from _instances()


def _engine(name: str, *, alone: bool) -> Finding:
    """Its version; `docker --version` alone works for everybody, so that Docker is also reached."""
    version = ""
    try:
        done = process.run([name, "version" if name in _BY_VERB else "--version"], check=False, seconds=_ANSWER_S)
        version = " ".join([name, *(done.out or done.err).strip().splitlines()[:1]])
        if done.code:
            return _unfit("engine", version)
        if name == "docker":
            from dray.clients import docker  # noqa: PLC0415  the SDK, which only a machine with Docker need load

            docker.client().close()
    except DrayError as error:
        found = "; ".join(filter(None, [version, error.problem]))
        # Another engine does without Docker's.
        return (_note if version and not alone else _unfit)("engine", found, error.finding.fix)
    return _ok("engine", version)


def _instances() -> Iterator[Finding]:
    """Notes on running instances: each holds a mount and a process until it is stopped."""
    from dray.clients import apptainer  # noqa: PLC0415  the Docker SDK and spython, which no other check needs

    try:
        found = apptainer.instances()
    except DrayError as error:
        yield _note("instances", f"{error.problem}\n{error.finding.found}".strip())
        return
    for one in found:
        fix = f"if you no longer use it: {apptainer.name()} instance stop {one['instance']}"
        yield _note("instance", f"{one['instance']} of {one['img']} runs (process {one['pid']})", fix)


def _unprivileged() -> Iterator[Finding]:
    limit = Path("/proc/sys/user/max_user_namespaces")
    if limit.exists() and limit.read_text(encoding="ascii").strip() == "0":
        fix = "an administrator must allow user namespaces, or install Apptainer with setuid"
        yield _unfit("engine", "user namespaces are off (max_user_namespaces is 0)", fix)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        fix = "ask the administrators for /dev/fuse: without it every start unpacks the image"
        yield _note("engine", "this user may not open /dev/fuse", fix)


def _slurm() -> Iterator[Finding]:
    if not process.which("sbatch"):
        fix = "dray run works without Slurm; make cluster starts one on this machine"
        yield _note("Slurm", "sbatch is not on PATH", fix)
        return
    version = process.run(["sbatch", "--version"], check=False).out.strip()
    try:
        partitions = slurm.partitions()
    except DrayError as error:
        fix = "run scontrol ping; is this machine a login node of the cluster?"
        yield _unfit("Slurm", error.details.get("found", "sinfo does not answer"), fix)
        return
    yield _ok("Slurm", f"{version}, cluster {slurm.cluster_name() or '(no name)'}")
    for partition in partitions[:12]:
        size = f"{counted(partition.nodes, 'node')}, {counted(partition.cpus, 'CPU')}"
        yield _ok("partition", f"{partition.name}, {size}, {partition.gres}")


def _gpus() -> Iterator[Finding]:
    driver = node.nvidia_driver()
    amd = [path for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id") if _is_gpu(path)]
    if driver:
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        yield _ok("GPU", f"{count} from NVIDIA, driver {driver}")
    if amd and os.access("/dev/kfd", os.R_OK | os.W_OK):
        yield _ok("GPU", f"{len(amd)} from AMD, driver {node.amdgpu_driver() or 'of the kernel'}")
    elif amd:
        fix = "join the group of /dev/kfd (render or video)"
        yield _unfit("GPU", f"{len(amd)} from AMD, and this user may not open /dev/kfd", fix)
    if not amd and not driver:
        yield _note("GPU", "none (a login node has none either)")


def _is_gpu(identity: Path) -> bool:
    try:
        return identity.read_text(encoding="ascii").strip() not in ("", "0")
    except OSError:  # a GPU of another job
        return False


def _network() -> Iterator[Finding]:
    network = host.network()
    devices = " ".join((*network.slingshot, *network.infiniband))
    interfaces = " ".join(network.interfaces) or "none"
    found = f"{devices or 'no Slingshot and no InfiniBand device'}; interfaces {interfaces}"
    yield (_ok if devices else _note)("fabric", found)


def _room() -> Iterator[Finding]:
    defaults = Preflight()
    yield node.shared_memory(defaults.shared_memory_gb)
    yield node.free_space(node.SCRATCH, defaults.free_gb)


def _hf_home() -> Iterator[Finding]:
    folder = os.environ.get("HF_HOME")
    if not folder:
        fix = "export HF_HOME=FOLDER, a folder on a disk that all nodes share, before you submit"
        yield _note(
            "HF_HOME", "is not set: dray takes ~/.cache/huggingface if it exists, else .cache-UID beside the runs", fix
        )
    elif not os.access(folder, os.W_OK):
        yield _unfit("HF_HOME", f"this user cannot write {folder}", "set it to a writable folder that all nodes share")
    else:
        yield _ok("HF_HOME", folder)


def _images() -> Iterator[Finding]:
    try:
        root = dray_home.root()
    except DrayError as error:
        yield _unfit("checkout", error.problem, error.details.get("fix", ""))
        return
    built = {variant: store.sif(root, variant) for variant in ACCELERATORS}
    images = [f"{variant}: {file}" for variant, file in built.items() if file.exists()]
    adopted = {name: store.adopted(root, name) for name in store.adopted_names(root)}
    images += [f"{name}, adopted as {store.variant(file)}: {file.resolve()}" for name, file in adopted.items()]
    yield from (_ok("image", image) for image in images)
    if not images:
        yield _note(
            "image",
            f"none in {root / 'build'}",
            "make image-cpu (or -cuda, -cuda12, -rocm, -rocm6), or copy one to build/",
        )


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
            yield (_unfit if bind.required else _note)("bind", f"{bind.path} does not exist ({bind.why})")
    if site.interfaces and not any(Path("/sys/class/net", name).exists() for name in site.interfaces):
        fix = "run dray doctor on a compute node; if it says the same there, correct interfaces in the site file"
        yield _unfit("interface", f"this machine has none of {', '.join(site.interfaces)}", fix)
    yield from _libraries(site)
    cpus = os.cpu_count() or 0
    if site.cpus_per_node and cpus != site.cpus_per_node:
        found = f"{cpus} on this machine, {site.cpus_per_node} on a node of the site"
        yield _note("CPUs", found, "run dray doctor on a compute node of that partition")


def _libraries(site: Site) -> Iterator[Finding]:
    if site.fabric.strategy != "host":
        return
    for pattern in site.fabric.files:
        if not list(Path("/").glob(pattern.lstrip("/"))):
            found = f"{pattern} does not exist: ranks would fall back to TCP"
            yield _unfit("library", found, f"correct the site file (dray site show {site.name})")
