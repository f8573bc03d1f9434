"""The environment of the runner, of the launcher and of the preflight's ranks."""

from __future__ import annotations

import os

from dray.contract import heartbeat
from dray.contract.node_start import is_early
from dray.runner import cores
from dray.runner.plan import Endpoint, Environ, Plan
from dray.runner.protocol import Restart


def merge(plan: Plan) -> None:
    """Set the plan's variables in this process. What the node has handed in stays: what starts a container needs
    (`is_early`), and the job's own values of `pass_env`."""
    passed = os.environ.keys() & plan.pass_env
    for name, value in plan.env:
        if name not in passed and not is_early(name):
            os.environ[name] = value


def of(plan: Plan, store: Endpoint, start: Restart, gloo: Environ) -> dict[str, str]:
    """The variables on this node, with the store at this address and port."""
    most = plan.world.max_restarts
    found = {
        # Where nobody has set another; torchrun and torch leave files in the first.
        "TMPDIR": plan.scratch,
        **gloo,
        **os.environ,
        **cores.placed(plan.world, os.environ),
        # What joins the store: dray.tcp_store.handler in torchrun and accelerate, torch itself in other ranks.
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "GROUP_RANK": str(plan.me),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Under every launcher, as torchrun has it: else Lightning takes a rank for a task of srun, and puts the job
        # back into the queue itself.
        "TORCHELASTIC_RUN_ID": plan.run,
        heartbeat.FOLDER: plan.scratch,
    }
    if most:  # the launcher, which starts ranks once, would tell them another number
        found["DRAY_RESTARTS"] = f"{start.number}/{most}"
    return found
