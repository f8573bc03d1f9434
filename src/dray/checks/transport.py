"""Finds the transport that NCCL or RCCL used between nodes, from its own log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dray.contract.findings import Finding

# The last line of these decides. `Initialized NET plugin` is also logged for plugins that are dropped later.
_PROVIDER = re.compile(r"NET/OFI Selected provider is (?P<name>[^\s,]+)", re.IGNORECASE)
_NETWORK = re.compile(
    r"(Assigned NET plugin |Using network |via NET/)(?P<name>\S.*?)( to comm|/\d|\s*$)", re.IGNORECASE
)
# Plugins over libfabric: its provider is the transport.
_CARRIERS = re.compile(r"^(AWS )?Libfabric$|^OFI$", re.IGNORECASE)
# Each is a cause of those below it.
_PROBLEMS = (
    (
        re.compile(r"Failed to open libibverbs|NET/IB : No device found", re.IGNORECASE),
        "InfiniBand is not visible in the container: bind libibverbs and /dev/infiniband",
    ),
    (
        re.compile(r"Couldn't open a fabric access domain", re.IGNORECASE),
        "some of the host's libraries are missing: list all that the plugin needs in fabric.libraries",
    ),
    (
        re.compile(r"No eligible providers were found", re.IGNORECASE),
        "libfabric has no provider for this network: bind /dev/cxi* and the host's libfabric",
    ),
    (
        re.compile(r"Could not find:|No plugin found|network .+ not found", re.IGNORECASE),
        "the container has no NCCL plugin: if this network needs one, name its file in fabric.plugin",
    ),
    (
        re.compile(r"Failed to initialize (any )?NET plugin", re.IGNORECASE),
        "the plugin does not start: docs/sites.md says how to see what it lacks",
    ),
)
# By HCA where the driver lacks it; by GPU and HCA where they are far apart, beside others that are near.
_DIRECT = re.compile(r"GPU Direct RDMA.* (Enabled|Disabled) for (HCA|GPU)", re.IGNORECASE)


class Transport(NamedTuple):
    """The transport that was used, the line of the log that names it, and the problem that led to it."""

    name: str
    line: str
    problem: str = ""
    fix: str = ""


def used(lines: Sequence[str]) -> Transport | None:
    """The transport that the log names; None if it names none, as on one node."""
    provider, network = _last(_PROVIDER, lines), _last(_NETWORK, lines)
    chosen = provider if network is None or (provider and _CARRIERS.match(network.name)) else network
    if chosen is None:
        return None
    for pattern, advice in _PROBLEMS:
        if problem := next((line for line in lines if pattern.search(line)), ""):
            return chosen._replace(problem=problem, fix=advice)
    return chosen


def _last(pattern: re.Pattern[str], lines: Sequence[str]) -> Transport | None:
    for line in reversed(lines):
        if match := pattern.search(line):
            return Transport(match["name"].rstrip(","), line)
    return None


def indirect(lines: Sequence[str], used: Transport | None) -> Finding | None:
    """A warning if NCCL's log says that no network card reads the GPUs' memory itself; sockets never do."""
    if used is None or used.name.casefold() == "socket":
        return None
    about = [line for line in lines if _DIRECT.search(line)]
    if not about or any(" enabled for " in line.casefold() for line in about):
        return None
    return Finding(
        "GPU Direct RDMA is disabled: data between nodes is copied through the host's memory",
        found=about[0],
        fix="ask the administrators for nvidia-peermem, or for NVIDIA's open kernel modules, which have DMA-BUF",
    )
