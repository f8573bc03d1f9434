"""Explain sbatch's refusals, with what the cluster offers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from dray.contract.findings import ConfigError, DrayError, counted, listed, nearest
from dray.runs import slurm
from dray.runs.slurm import Partition

_SHOWN = 6
_SIZES = (
    "Requested node configuration is not available", "Node count specification invalid", "Invalid generic resource",
    "More processors requested than permitted", "Requested partition configuration not available",
)  # fmt: skip


class _Name(NamedTuple):
    """An option of sbatch whose value must exist on the cluster."""

    long: str
    short: str
    known: Callable[[], list[str]]


def _partitions() -> list[Partition]:
    with suppress(DrayError):  # sbatch's refusal is what the user must see
        return slurm.partitions()
    return []


def _partition_names() -> list[str]:
    return [*dict.fromkeys(one.name for one in _partitions())]


_NAMES = {
    "Invalid partition name": _Name("partition", "p", _partition_names),
    "No partition specified": _Name("partition", "p", _partition_names),
    "Invalid account": _Name("account", "A", slurm.accounts),
    "Invalid qos": _Name("qos", "q", slurm.qualities),
    "Invalid feature": _Name("constraint", "C", slurm.features),
}


def explained(refused: DrayError, argv: Sequence[str]) -> DrayError:
    """sbatch's refusal with the valid values and the nearest one; unchanged if Slurm tells no more."""
    message = refused.finding.found
    for text, name in _NAMES.items():
        if text in message:
            return _named(message, name, argv)
    if any(text in message for text in _SIZES):
        return _sized(message, argv)
    if "Requested time limit is invalid" in message:
        limits = slurm.limits()
        return ConfigError(
            "Slurm refuses this --time",
            wanted="\n".join(f"{name}: at most {limit}" for name, limit in [*limits.items()][:_SHOWN]),
            found=message,
            fix="use --sbatch=--time=HH:MM:SS within the partition's limit",
        )
    return refused


def _named(message: str, name: _Name, argv: Sequence[str]) -> ConfigError:
    known, given = name.known(), _value(argv, name.long, name.short)
    article = "an" if name.long[0] in "aeiou" else "a"
    near = nearest(given, known) or "".join(known[:1])
    return ConfigError(
        f"Slurm refuses this {name.long}" if given else f"Slurm needs {article} {name.long}",
        wanted=f"one of {listed(known)}" if known else f"{article} {name.long} of this cluster",
        found=f"--{name.long}={given}\n{message}" if given else message,
        fix=f"--sbatch=--{name.long}={near or name.long.upper()}",
    )


def _sized(message: str, argv: Sequence[str]) -> ConfigError:
    """Explain the refusal of nodes and GPUs that the partition does not have."""
    partitions = _partitions()
    nodes, gpus = _number(argv, "nodes"), max(_number(argv, "gpus-per-node"), _number(argv, "gres"))
    named = _value(argv, "partition", "p").split(",")
    asked = [one for one in partitions if one.name in named] or partitions[:1]
    return ConfigError(
        "no nodes of the partition match what this job requests",
        wanted="\n".join(f"{one.name}: {_size(one)}" for one in partitions[:_SHOWN]),
        found=f"{counted(nodes, 'node')}, {counted(gpus, 'GPU')} on each\n{message}",
        fix=_fix(nodes, gpus, asked, partitions),
    )


def _size(one: Partition) -> str:
    gpus = counted(one.gpus, "GPU") if one.gpus else "no GPUs"
    return f"{counted(one.nodes, 'node')} with {counted(one.cpus, 'CPU')}, {gpus}"


def _fix(nodes: int, gpus: int, asked: Sequence[Partition], partitions: Iterable[Partition]) -> str:
    if fitting := [one.name for one in partitions if one.nodes >= nodes and one.gpus >= gpus and one not in asked]:
        return f"--sbatch=--partition={fitting[0]}"
    if most := max((one.gpus for one in asked if one.gpus < gpus), default=0):
        return f"--gpus-per-node {most}"
    if gpus and not any(one.gpus for one in asked):
        return "these nodes have no GPUs: leave out --gpus-per-node and set image=cpu"
    if most := max((one.nodes for one in asked if one.nodes < nodes), default=0):
        return f"--nodes {most}"
    return "request less with --sbatch, for example --sbatch=--cpus-per-task=N or --sbatch=--mem=SIZE"


def _value(argv: Sequence[str], long: str, short: str) -> str:
    """The option's last value on the command line, or in sbatch's environment."""
    value = os.environ.get(f"SBATCH_{long.upper()}", "")
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith(f"--{long}="):
            value = word.partition("=")[2]
        elif word in (f"--{long}", f"-{short}"):
            value = after
        elif word.startswith(f"-{short}") and short:
            value = word[2:]
    return value


def _number(argv: Sequence[str], long: str) -> int:
    found = re.search(r"\d+$", _value(argv, long, ""))
    return int(found[0]) if found else 0
