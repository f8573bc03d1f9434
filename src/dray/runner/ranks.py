"""Starts a node's ranks without an agent, each with the variables that torch reads. Started by file: milliseconds.

In a Slurm job each rank also gets the variables of a task of its own, as srun would set them.

One rank that dies ends the others, and its own exit code is this program's.
"""

import os
import signal
import sys

# As in rank.py.
if __name__ == "__main__":
    sys.path[:] = [*sys.path[1:], os.path.abspath(f"{__file__}/../../..")]

from dray.contract import exit_codes
from dray.runner import children

_GRACE = 10.0  # seconds from asking ranks to end to ending them


def main(argv: list[str]) -> int:
    """NODES RANKS NODE MASTER PORT COMMAND...: run it once for each local rank; return the first code that is not 0."""
    nodes, each, node = map(int, argv[:3])
    master, port, *command = argv[3:]
    runner = os.getppid()
    ranks = children.Children()
    for local in range(each):
        variables = {
            "RANK": node * each + local,
            "LOCAL_RANK": local,
            "GROUP_RANK": node,
            "WORLD_SIZE": nodes * each,
            "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": master,
            "MASTER_PORT": port,
            **_task(nodes, each, node, local),
        }
        # A session of its own, as torchrun's ranks have: a signal to the group comes from here alone.
        env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        ranks.start(command, label=local, env=env, session=True)
    first, asked = 0, False
    while ranks.running:
        signals, ended = ranks.wait()
        pass_on(signals, ranks, runner)
        asked |= signal.SIGUSR1 in signals
        for code in ended.values():
            first = first or children.exit_code(code)
        if first and not (asked and first == exit_codes.RETRY):  # the others still save
            ranks.end(_GRACE)
    return first


def pass_on(signals: list[int], ranks: children.Children, parent: int) -> None:
    """Let ranks hear what this process has heard; end them if the parent with this process id has died."""
    for number in signals:
        if number == signal.SIGUSR1:
            ranks.ask()
        else:
            ranks.tell(number)
    if signals and os.getppid() != parent:
        ranks.end(_GRACE)


def _task(nodes: int, each: int, node: int, local: int) -> dict[str, object]:
    """The variables that srun would set for a task of this rank; empty outside of a Slurm task."""
    if "SLURM_PROCID" not in os.environ:
        return {}
    layout = f"{each}(x{nodes})" if nodes > 1 else each
    task: dict[str, object] = {
        "SLURM_PROCID": node * each + local,
        "SLURM_LOCALID": local,
        "SLURM_NODEID": node,
        "SLURM_NNODES": nodes,
        "SLURM_NTASKS_PER_NODE": each,
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), layout),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), nodes * each),
    }
    if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # of the one task that has started all ranks of the node
        task["SLURM_CPUS_PER_TASK"] = max(1, int(cores) // each)
    return task


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
