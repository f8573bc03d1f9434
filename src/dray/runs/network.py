"""A run's containers on this machine, their private network, and the end of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dray import process
from dray.engines.docker import LABEL, network
from dray.plan import Plan


@contextmanager
def containers(plan: Plan) -> Iterator[None]:
    """A private network if all nodes are here; no container of the run stays. Docker and Podman take the same words."""
    tool, label = plan.engine, f"{LABEL}={plan.run}"
    private = plan.world.one_machine
    if private:
        process.run([tool, "network", "create", f"--label={label}", network(plan)])
    try:
        yield
    finally:
        left = process.run([tool, "ps", "--all", "--quiet", f"--filter=label={label}"]).out.split()
        if left:
            process.run([tool, "rm", "--force", *left], check=False)  # one may end by itself at this very moment
        if private:
            process.run([tool, "network", "rm", network(plan)])
