"""Write a site's file from what this machine shows, asking nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dray import process
from dray.runs import submit

# Where clusters tell their users that they may write; never the home.
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
_FAST = re.compile(r"^(hsn|ib)\d+$")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What there is to see, by the partition that has most GPUs."""

    cluster: str
    partition: str = ""
    nodes: int = 0
    cpus: int = 0
    gpus: int = 0
    interfaces: tuple[str, ...] = ()
    kind: str = "unknown"
    scratch: Mapping[str, str] = field(default_factory=dict)


def see(environ: Mapping[str, str], root: Path = Path("/")) -> Seen:
    """Look at Slurm, at this machine's network, and at the user's variables."""
    partitions = sorted(_partitions(), key=lambda row: (row[3], row[1]), reverse=True)
    best = partitions[0] if partitions else ("", 0, 0, 0)
    links = sorted(path.name for path in (root / "sys/class/net").glob("*") if _FAST.match(path.name))
    kind = "unknown"
    if any(name.startswith("hsn") for name in links) or list((root / "dev").glob("cxi[0-9]*")):
        kind = "slingshot"
    elif list((root / "sys/class/infiniband").glob("*")):
        kind = "infiniband"
    home = environ.get("HOME", "")
    places = {name: environ[name] for name in _SCRATCH if environ.get(name, "").startswith("/")}
    return Seen(
        cluster=submit.cluster(),
        partition=best[0],
        nodes=best[1],
        cpus=best[2],
        gpus=best[3],
        interfaces=tuple(links),
        kind=kind,
        scratch={name: path for name, path in places.items() if not f"{home}/".startswith(f"{path.rstrip('/')}/")},
    )


def _partitions() -> Iterator[tuple[str, int, int, int]]:
    if not process.which("sinfo"):
        return
    for line in process.run(["sinfo", "--noheader", "--format=%R|%D|%c|%G"], check=False).out.splitlines():
        name, nodes, cpus, gres = line.split("|")
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gres))
        yield name, int(re.sub(r"\D.*", "", nodes) or 0), int(re.sub(r"\D.*", "", cpus) or 0), gpus


def text(name: str, seen: Seen) -> str:
    """The file, with the reason of each line, and what could not be seen as comments."""

    def said(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    lines = [f"name = {said(name)}", f"about = {said(f'{seen.cluster or name}, as one of its machines showed it')}"]
    why = {}
    if seen.cluster:
        lines.append(f"clusters = {said([seen.cluster])}")
        why["clusters"] = "scontrol show config says so"
    if seen.gpus:
        lines.append(f"gpus_per_node = {seen.gpus}")
        why["gpus_per_node"] = f"sinfo says so of partition {seen.partition}"
    if seen.cpus:
        lines.append(f"cpus_per_node = {seen.cpus}")
        why["cpus_per_node"] = f"sinfo says so of partition {seen.partition}"
    if seen.partition:
        lines.append(f"sbatch = {said([f'--partition={seen.partition}'])}  # add --account=... where it is wanted")
        why["sbatch"] = f"the partition with most GPUs on a node, {seen.nodes} nodes"
    if seen.interfaces:
        lines.append(f"interfaces = {said(list(seen.interfaces))}")
        why["interfaces"] = "this machine's fast links; a compute node's may have other names"
    if not seen.partition:
        lines.append("# No Slurm was seen here: sbatch, gpus_per_node and cpus_per_node are yours to add.")
    for variable, path in seen.scratch.items():
        lines += ["", "[[binds]]", f"path = {said('$' + variable)}", f"why = {said(f'your data; {path} here')}"]
        lines += ["write = true", "required = false"]
    if seen.kind != "unknown":
        # The IB verbs in NCCL need nothing of the host's; for Slingshot a * takes the newest.
        lines += ["", "[fabric]", f"kind = {said(seen.kind)}"]
        lines.append(f"transport = {said(['IB'] if seen.kind == 'infiniband' else ['cxi'])}")
        if seen.kind == "slingshot":
            lines += [
                "# Where the image has no libfabric with cxi, the host's goes in; docs/fabric.md says how to find it.",
                '# strategy = "host"',
                '# libraries = ["/opt/cray/libfabric/*/lib64/libfabric.so.1", "/usr/lib64/libcxi.so.1"]',
            ]
    if why:
        lines += ["", "[why]", *(f"{key} = {said(reason)}" for key, reason in why.items())]
    return "\n".join(lines) + "\n"


def place(folder: Path, name: str, written: str) -> Path:
    """Write it, and never over a file that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:
        file.write(written)
    return path
