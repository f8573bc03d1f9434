"""Explain sbatch's refusals, with what the cluster offers."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

from dray.contract.findings import ConfigError, DrayError, counted, listed, nearest
from dray.runs import slurm


def _partitions() -> list[slurm.Partition]:
    with suppress(DrayError):  # sbatch's refusal is what the user must see
        return slurm.partitions()
    return []


_NAMES = {  # sbatch's message, and the option that it is about
    "Invalid partition name": ("partition", "p"),
    "No partition specified": ("partition", "p"),
    "Invalid account": ("account", "A"),
    "Invalid qos": ("qos", "q"),
    "Invalid feature": ("constraint", "C"),
}
_SHOWN = 6  # partitions
_SIZES = ("--partition", "-p", "--nodes", "-N", "--gpus-per-node", "--gres", "--cpus-per-task", "--mem")
_SIZE = re.compile(
    "Requested node configuration is not available|Node count specification invalid|Invalid generic resource"
    "|More processors requested than permitted|Requested partition configuration not available"
)


def explained(refused: DrayError, argv: Sequence[str]) -> DrayError:
    """sbatch's refusal with the valid values and the nearest one; unchanged if Slurm tells no more."""
    message = refused.finding.found
    for text, (option, letter) in _NAMES.items():
        if text in message:
            if option == "partition":
                known = [*dict.fromkeys(partition.name for partition in _partitions())]
            else:
                known = slurm.offered(option)
            return _named(message, option, _given(argv, option, letter), known)
    if _SIZE.search(message):
        return _sized(message, argv)
    if "Requested time limit is invalid" in message:
        return ConfigError(
            "Slurm refuses this --time",
            wanted="\n".join(f"{name}: at most {limit}" for name, limit in slurm.limits().items()),
            found=message,
            fix="use --sbatch=--time=HH:MM:SS within the partition's limit",
        )
    return refused


def command(argv: Sequence[str]) -> str:
    """The sbatch command to type again, with the variables that have options for it."""
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("SBATCH_")]
    return shlex.join(["env", *given, *argv] if given else argv)


def _options(argv: Sequence[str]) -> list[str]:
    """sbatch's own options, without those of the script."""
    return [*takewhile(lambda word: not word.endswith(".sh"), argv)]


def _given(argv: Sequence[str], option: str, letter: str) -> str:
    """The last value of an option on sbatch's command line, or in its environment."""
    values = re.findall(rf" (?:--{option}[= ]|-{letter} ?)(\S+)", " ".join(_options(argv)))
    return values[-1] if values else os.environ.get(f"SBATCH_{option.upper()}", "")


def _named(message: str, option: str, given: str, known: list[str]) -> ConfigError:
    near = nearest(given, known) or next(iter(known), option.upper())
    return ConfigError(
        f"Slurm refuses this {option}" if given else f"Slurm needs --{option}",
        wanted=f"one of {listed(known)}" if known else f"a value of --{option} on this cluster",
        found=f"--{option}={given}\n{message}" if given else message,
        fix=f"--sbatch=--{option}={near}",
    )


def _sized(message: str, argv: Sequence[str]) -> ConfigError:
    """Explain the refusal of nodes and GPUs that the partition does not have."""
    rows = [
        f"{partition.name}: {counted(partition.nodes, 'node')} with {counted(partition.cpus, 'CPU')}, "
        f"{counted(partition.gpus, 'GPU')}"
        for partition in _partitions()[:_SHOWN]
    ]
    return ConfigError(
        "no nodes of the partition match what this job requests",
        wanted="\n".join(rows),
        found=f"{' '.join(word for word in _options(argv) if word.startswith(_SIZES))}\n{message}",
        fix="another --sbatch=--partition=NAME; or less: --nodes, --gpus-per-node, --sbatch=--cpus-per-task=N or "
        "--sbatch=--mem=SIZE",
    )
