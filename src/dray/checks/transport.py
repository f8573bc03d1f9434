"""Which wire NCCL or RCCL really used, from its own words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# The last of these that a log has decides. `Initialized NET plugin` is said of plugins that are dropped later.
_DECISIVE = (
    re.compile(r"NET/OFI Selected provider is (?P<name>[^\s,]+)", re.IGNORECASE),
    re.compile(r"Assigned NET plugin (?P<name>.+?) to comm", re.IGNORECASE),
    re.compile(r"Using network (?P<name>\S.*?)\s*$", re.IGNORECASE),
    re.compile(r"via NET/(?P<name>[^/\s]+)/\d", re.IGNORECASE),
)
# Plugins that carry libfabric by another name: the provider tells, and not they.
_CARRIERS = re.compile(r"^(AWS )?Libfabric$|^OFI$", re.IGNORECASE)
# What stands first is the cause of what stands below it.
_TROUBLE = (
    (
        re.compile(r"Failed to open libibverbs|NET/IB : No device found", re.IGNORECASE),
        "InfiniBand is not seen in the container: it needs libibverbs and /dev/infiniband in there",
    ),
    (
        re.compile(r"Couldn't open a fabric access domain", re.IGNORECASE),
        "the host's libraries are there in part only: give all that the plugin needs in fabric.libraries",
    ),
    (
        re.compile(r"No eligible providers were found", re.IGNORECASE),
        "libfabric has no provider for this network: /dev/cxi* or the host's libfabric is not in the container",
    ),
    (
        re.compile(r"Could not find:|No plugin found|network .+ not found", re.IGNORECASE),
        "where the network wants a plugin, it is not in the container: name its file in fabric.plugin",
    ),
    (
        re.compile(r"Failed to initialize (any )?NET plugin", re.IGNORECASE),
        "the plugin is there and does not start: dray site show --image says what it lacks",
    ),
)


@dataclass(frozen=True)
class Wire:
    """What was used, the line that says so, and what went wrong on the way."""

    name: str
    line: str
    trouble: str = ""
    fix: str = ""


def used(lines: Iterable[str]) -> Wire | None:
    """None where the log does not tell, as on one node, which needs no network."""
    provider, network, worst, trouble, fix = None, None, len(_TROUBLE), "", ""
    for line in lines:
        for pattern in _DECISIVE:
            found = pattern.search(line)
            if found and pattern is _DECISIVE[0]:
                provider = Wire(found["name"].rstrip(","), line.strip())
            elif found:
                network = Wire(found["name"], line.strip())
        for number, (pattern, advice) in enumerate(_TROUBLE[:worst]):
            if pattern.search(line):
                worst, trouble, fix = number, line.strip(), advice
                break
    chosen = provider if network is None or (provider and _CARRIERS.match(network.name)) else network
    return chosen and Wire(chosen.name, chosen.line, trouble, fix)
