"""A run's containers and their private network, in Docker or Podman: both take the same commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dray import process


@contextmanager
def removed_after(engine: str, *, label: str, network: str | None) -> Iterator[None]:
    """Create the network, if one is named; at the end remove it, and all containers with this label."""
    if network:
        process.run([engine, "network", "create", f"--label={label}", network])
    try:
        yield
    finally:  # what goes wrong here must not hide how the run ended
        left = process.run([engine, "ps", "--all", "--quiet", f"--filter=label={label}"], check=False).out.split()
        if left:
            process.run([engine, "rm", "--force", *left], check=False)  # one may end by itself at this very moment
        if network and process.run([engine, "network", "rm", network], check=False).code:
            print(f"dray: a network stays: {engine} network rm {network}", file=sys.stderr)
