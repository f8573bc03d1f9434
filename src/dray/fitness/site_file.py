"""Write a site file from what this machine shows, without questions."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dray.contract import files
from dray.contract.findings import DrayError, counted
from dray.fitness import host
from dray.runs import slurm

# Variables in which clusters name folders that users may write; never the home.
_SCRATCH = (
    "SCRATCH",
    "PSCRATCH",
    "MYSCRATCH",
    "SCRATCHDIR",
    "WORK",
    "PROJECT",
    "FAST",
    "MEMBERWORK",
    "PROJWORK",
    "WORKDIR",
)
# Keys that dray cannot find out; `dray site keys` lists all.
_COMMENTED = (
    '# image = "cuda"           # the variant for its GPUs: cuda, rocm; for older drivers cuda12, rocm6',
    "# gpu_memory_gb = 40       # of one GPU: dray refuses a run that does not fit before it is queued",
    '# account = "project_1"    # an example; needed if the cluster requires --account',
    '# gpu_option = "gres"      # if sbatch wants --gres=gpu:N instead of --gpus-per-node=N',
)
_FAST = re.compile(r"^(hsn|ib)\d+$")


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What a site file needs to know, from the partition with most GPUs on a node."""

    cluster: str
    machine: str = ""
    """The name of a login node, with * for the number at its end."""
    partition: slurm.Partition | None = None
    interfaces: tuple[str, ...] = ()
    fabric: str = "unknown"
    scratch: Mapping[str, str] = field(default_factory=dict)


def probe(environ: Mapping[str, str], root: Path = Path("/")) -> Probed:
    """Ask Slurm, this machine's network and the user's variables."""
    partitions: list[slurm.Partition] = []
    with suppress(DrayError):  # if Slurm does not answer, the file says what is missing
        partitions = slurm.partitions()
    network = host.network(root)
    interfaces = tuple(path.name for path in sorted((root / "sys/class/net").glob("*")) if _FAST.match(path.name))
    slingshot = network.slingshot or any(name.startswith("hsn") for name in interfaces)
    home = environ.get("HOME", "")
    folders = {name: environ[name] for name in _SCRATCH if environ.get(name, "").startswith("/")}
    return Probed(
        cluster=slurm.cluster_name(),
        machine=_pattern(socket.gethostname()),
        partition=max(partitions, key=lambda one: (one.gpus, one.nodes), default=None),
        interfaces=interfaces,
        fabric="slingshot" if slingshot else "infiniband" if network.infiniband else "unknown",
        scratch={name: path for name, path in folders.items() if not f"{home}/".startswith(f"{path.rstrip('/')}/")},
    )


def render(name: str, probed: Probed) -> str:
    """The text of the file: each line with its reason, and comments for what the probe did not find."""
    lines = [f"name = {_toml(name)}", f"about = {_toml(f'{probed.cluster or name}, as one of its machines shows it')}"]
    why = {}
    if probed.cluster:
        lines.append(f"clusters = {_toml([probed.cluster])}")
        why["clusters"] = "ClusterName of scontrol show config"
    elif probed.machine:  # dray recognises the machine by one of the two
        lines.append(f"hosts = {_toml([probed.machine])}")
        why["hosts"] = "the name of this machine"
    partition = probed.partition
    if partition is None:
        lines.append("# No Slurm on this machine: add sbatch, gpus_per_node and cpus_per_node.")
        lines += ['# sbatch = ["--partition=gpu"]', "# gpus_per_node = 4", "# cpus_per_node = 64"]
    else:
        for key, count in (("gpus_per_node", partition.gpus), ("cpus_per_node", partition.cpus)):
            if count:
                lines.append(f"{key} = {count}")
                why[key] = f"sinfo, partition {partition.name}"
        lines.append(f"sbatch = {_toml([f'--partition={partition.name}'])}  # and --account=..., if needed")
        why["sbatch"] = f"the partition with most GPUs on a node, {counted(partition.nodes, 'node')}"
    if probed.interfaces:
        lines.append(f"interfaces = {_toml(list(probed.interfaces))}")
        why["interfaces"] = "this machine's fast interfaces; a compute node's may have other names"
    else:
        lines.append('# interfaces = ["ib0"]  # of the fast network; `ip link` shows them on a compute node')
    lines += _COMMENTED
    for variable, path in probed.scratch.items():
        lines += ["", "[[binds]]", f"path = {_toml('$' + variable)}", f"why = {_toml(f'your data; {path} for you')}"]
        lines += ["write = true", "required = false"]
    lines += _fabric(probed.fabric)
    if why:
        lines += ["", "[why]", *(f"{key} = {_toml(reason)}" for key, reason in why.items())]
    return "\n".join(lines) + "\n"


def _pattern(name: str) -> str:
    """A pattern for the machine and its neighbours: login* for login3.cluster, box for box."""
    short = name.partition(".")[0]
    return re.sub(r"\d+$", "*", short) if re.match(r"[A-Za-z0-9_-]*[A-Za-z]", short) else ""


def _fabric(kind: str) -> list[str]:
    if kind == "unknown":
        return []
    lines = ["", "[fabric]", f"kind = {_toml(kind)}"]
    if kind == "infiniband":  # NCCL's own IB transport needs no library of the host
        return [*lines, f"transport = {_toml(['IB'])}"]
    return [
        *lines,
        f"transport = {_toml(['cxi'])}",
        "# If the image has no libfabric with cxi, bind the host's; docs/sites.md says how to find it.",
        '# strategy = "host"',
        '# libraries = ["/opt/cray/libfabric/*/lib64/libfabric.so.1", "/usr/lib64/libcxi.so.1"]',
    ]


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def write(folder: Path, name: str, content: str) -> Path:
    """Write the file; never replace an existing one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    files.write_new(path, content)
    return path
