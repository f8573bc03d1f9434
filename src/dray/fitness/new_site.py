"""Write a site file from what this machine shows, without questions."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dray.contract.findings import DrayError, counted
from dray.fitness import network_and_site
from dray.runs import slurm

# Variables in which clusters name folders that users may write; never the home.
_SCRATCH = [
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
]
# Keys that dray cannot find out; `dray site keys` lists all.
_NO_SLURM = """# No Slurm on this machine: add sbatch, gpus_per_node and cpus_per_node.
# sbatch = ["--partition=gpu"]
# gpus_per_node = 4
# cpus_per_node = 64
"""
_COMMENTED = """# image = "cuda"           # the variant for its GPUs: cuda, rocm; for older drivers cuda12, rocm6
# gpu_memory_gb = 40       # of one GPU: dray refuses a run that does not fit before it is queued
# account = "project_1"    # an example; needed if the cluster requires --account
# gpu_option = "gres"      # if sbatch wants --gres=gpu:N instead of --gpus-per-node=N
"""
_FABRICS = {
    "": "",
    # NCCL's own IB transport needs no library of the host.
    "infiniband": '\n[fabric]\nkind = "infiniband"\ntransport = ["IB"]\n',
    "slingshot": """
[fabric]
kind = "slingshot"
transport = ["cxi"]
# If the image has no libfabric with cxi, bind the host's; docs/sites.md says how to find it.
# strategy = "host"
# libraries = ["/opt/cray/libfabric/*/lib64/libfabric.so.1", "/usr/lib64/libcxi.so.1"]
""",
}


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What a site file needs to know, from the partition with most GPUs on a node."""

    cluster: str
    machine: str = ""
    """The name of a login node, with * for the number at its end."""
    partition: slurm.Partition | None = None
    interfaces: tuple[str, ...] = ()
    fabric: str = ""
    """slingshot, infiniband, or empty if it is unknown."""
    scratch: Mapping[str, str] = field(default_factory=dict)


def probe(environ: Mapping[str, str], root: Path = Path("/")) -> Probed:
    """Ask Slurm, this machine's network and the user's variables."""
    partitions: list[slurm.Partition] = []
    with suppress(DrayError):  # if Slurm does not answer, the file says what is missing
        partitions = slurm.partitions()
    interfaces = [name for name in network_and_site.interfaces(root) if re.fullmatch(r"(hsn|ib)\d+", name)]
    devices = network_and_site.devices(root)
    fabric = "infiniband" if devices else ""
    if any(name.startswith(("cxi", "hsn")) for name in (*devices, *interfaces)):
        fabric = "slingshot"
    scratch = {}
    for name in _SCRATCH:
        path = environ.get(name, "")
        has_home = f"{environ.get('HOME', '')}/".startswith(f"{path.rstrip('/')}/")
        if path.startswith("/") and not has_home:
            scratch[name] = path
    return Probed(
        cluster=slurm.cluster_name(),
        machine=_pattern(socket.gethostname()),
        partition=max(partitions, key=lambda partition: (partition.gpus, partition.nodes), default=None),
        interfaces=tuple(interfaces),
        fabric=fabric,
        scratch=scratch,
    )


def render(name: str, probed: Probed) -> str:
    """The text of the file: each line with its reason, and comments for what the probe did not find."""
    values: list[tuple[str, object, str]] = []
    if probed.cluster:
        values.append(("clusters", [probed.cluster], "ClusterName of scontrol show config"))
    elif probed.machine:  # dray recognises the machine by one of the two
        values.append(("hosts", [probed.machine], "the name of this machine"))
    partition = probed.partition
    if partition:
        source = f"sinfo, partition {partition.name}"
        values += [("gpus_per_node", partition.gpus, source), ("cpus_per_node", partition.cpus, source)]
        why = f"the partition with most GPUs on a node, {counted(partition.nodes, 'node')}; add --account=... if needed"
        values.append(("sbatch", [f"--partition={partition.name}"], why))
    if probed.interfaces:
        why = "this machine's fast interfaces; a compute node's may have other names"
        values.append(("interfaces", probed.interfaces, why))
    values = [(key, value, why) for key, value, why in values if value]
    text = f"name = {_toml(name)}\nabout = {_toml(f'{probed.cluster or name}, as one of its machines shows it')}\n"
    text += "".join(f"{key} = {_toml(value)}\n" for key, value, _ in values)
    if not partition:
        text += _NO_SLURM
    if not probed.interfaces:
        text += '# interfaces = ["ib0"]  # of the fast network; `ip link` shows them on a compute node\n'
    text += _COMMENTED
    for variable, path in probed.scratch.items():
        text += f"\n[[binds]]\npath = {_toml('$' + variable)}\nwhy = {_toml(f'your data; {path} for you')}\n"
        text += "write = true\nrequired = false\n"
    text += _FABRICS[probed.fabric]
    if values:
        text += "\n[why]\n" + "".join(f"{key} = {_toml(why)}\n" for key, _, why in values)
    return text


def _pattern(name: str) -> str:
    """A pattern for the machine and its neighbours: login* for login3.cluster, box for box."""
    short = name.partition(".")[0]
    return re.sub(r"\d+$", "*", short) if re.match(r"[A-Za-z0-9_-]*[A-Za-z]", short) else ""


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
