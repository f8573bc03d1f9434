"""Explain sbatch's refusals, with what the cluster offers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress

from dray.contract.findings import ConfigError, DrayError, counted, listed, nearest
from dray.runs import slurm
from dray.runs.slurm import Partition


def _partitions() -> list[Partition]:
    with suppress(DrayError):  # sbatch's refusal is what the user must see
        return slurm.partitions()
    return []


def _partition_names() -> list[str]:
    return [partition.name for partition in _partitions()]


_NAMES = {  # sbatch's message, the option that it is about, and the values that the cluster has
    "Invalid partition name": ("partition", "p", _partition_names),
    "No partition specified": ("partition", "p", _partition_names),
    "Invalid account": ("account", "A", slurm.accounts),
    "Invalid qos": ("qos", "q", slurm.qualities),
    "Invalid feature": ("constraint", "C", slurm.features),
}
_SHOWN = 6  # partitions
_SIZES = (
    "Requested node configuration is not available", "Node count specification invalid", "Invalid generic resource",
    "More processors requested than permitted", "Requested partition configuration not available",
)  # fmt: skip


def explained(refused: DrayError, argv: Sequence[str]) -> DrayError:
    """sbatch's refusal with the valid values and the nearest one; unchanged if Slurm tells no more."""
    message = refused.finding.found
    for text, (long, short, values) in _NAMES.items():
        if text in message:
            return _named(message, long, _value(argv, f"--{long}=", f"-{short}"), list(dict.fromkeys(values())))
    if any(text in message for text in _SIZES):
        return _sized(message, argv)
    if "Requested time limit is invalid" in message:
        return ConfigError(
            "Slurm refuses this --time",
            wanted="\n".join(f"{name}: at most {limit}" for name, limit in slurm.limits().items()),
            found=message,
            fix="use --sbatch=--time=HH:MM:SS within the partition's limit",
        )
    return refused


def _named(message: str, option: str, given: str, known: list[str]) -> ConfigError:
    article = "an" if option == "account" else "a"
    near = nearest(given, known) or next(iter(known), option.upper())
    return ConfigError(
        f"Slurm refuses this {option}" if given else f"Slurm needs {article} {option}",
        wanted=f"one of {listed(known)}" if known else f"{article} {option} of this cluster",
        found=f"--{option}={given}\n{message}" if given else message,
        fix=f"--sbatch=--{option}={near}",
    )


def _sized(message: str, argv: Sequence[str]) -> ConfigError:
    """Explain the refusal of nodes and GPUs that the partition does not have."""
    nodes, gpus = _number(argv, "--nodes=", "-N"), _number(argv, "--gpus-per-node=", "--gres=")
    partitions, rows = _partitions(), []
    for partition in partitions[:_SHOWN]:
        own_gpus = counted(partition.gpus, "GPU") if partition.gpus else "no GPUs"
        size = f"{counted(partition.nodes, 'node')} with {counted(partition.cpus, 'CPU')}"
        rows.append(f"{partition.name}: {size}, {own_gpus}")
    names = _value(argv, "--partition=", "-p").split(",")
    chosen = [partition for partition in partitions if partition.name in names]
    chosen = chosen or [partition for partition in partitions if partition.default]
    return ConfigError(
        "no nodes of the partition match what this job requests",
        wanted="\n".join(rows),
        found=f"{counted(nodes, 'node')}, {counted(gpus, 'GPU')} on each\n{message}",
        fix=_fix(nodes, gpus, chosen, partitions),
    )


def _fix(nodes: int, gpus: int, chosen: Sequence[Partition], partitions: Sequence[Partition]) -> str:
    """Another partition that is large enough, or else less of what the chosen one has too little of."""
    for partition in partitions:
        if partition not in chosen and partition.nodes >= nodes and partition.gpus >= gpus:
            return f"--sbatch=--partition={partition.name}"
    most_gpus = max((partition.gpus for partition in chosen), default=0)
    most_nodes = max((partition.nodes for partition in chosen), default=0)
    if chosen and gpus and not most_gpus:
        return "these nodes have no GPUs: leave out --gpus-per-node and set image=cpu"
    if most_gpus and gpus > most_gpus:
        return f"--gpus-per-node {most_gpus}"
    if most_nodes and nodes > most_nodes:
        return f"--nodes {most_nodes}"
    return "request less, for example --sbatch=--cpus-per-task=N or --sbatch=--mem=SIZE"


def _value(argv: Sequence[str], *names: str) -> str:
    """The last value on the command line of the option with these names (`--nodes=`, `-N`), or in sbatch's
    environment."""
    value = os.environ.get(f"SBATCH_{names[0].strip('-=').replace('-', '_').upper()}", "")
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        for name in names:
            if word.startswith(name):
                value = word.removeprefix(name) or after
            elif f"{word}=" == name:
                value = after
    return value


def _number(argv: Sequence[str], *names: str) -> int:
    found = re.search(r"\d+$", _value(argv, *names))
    return int(found[0]) if found else 0
