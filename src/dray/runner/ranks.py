"""Starts a node's ranks without an agent, each with the variables that torch reads. Started by file: milliseconds.

In a Slurm job each rank also gets the variables of a task of its own, as srun would set them.

One rank that dies ends the others, and its own exit code is this program's.
"""

import os
import signal
import sys

# As in rank.py.
if __name__ == "__main__":
    sys.path[:] = [*sys.path[1:], os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

from dray.contract import exit_codes
from dray.runner import children

_GRACE = 10.0  # seconds from asking the other ranks to end to ending them


def main(nodes: int, each: int, node: int, master: str, port: str, command: list[str]) -> int:
    """Run the command once for each local rank; return the first exit code that is not 0."""
    runner = os.getppid()
    ranks = children.Children()
    for local in range(each):
        rank = node * each + local
        world = {
            **{"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)},
            **{"WORLD_SIZE": str(nodes * each), "LOCAL_WORLD_SIZE": str(each)},
            **{"MASTER_ADDR": master, "MASTER_PORT": port},
        }
        # A session of its own, as torchrun's ranks have: a signal to the group comes from here alone.
        env = {**os.environ, **world, **_task(nodes, each, node, local)}
        ranks.start(command, label=rank, env=env, session=True)
    first, asked = 0, False
    while ranks.running:
        events = ranks.wait()
        for number in events.signals:
            if number == signal.SIGUSR1:
                asked = True
                ranks.ask()
            else:
                ranks.tell(number)
        if events.signals and os.getppid() != runner:
            ranks.end(_GRACE)
        for code in events.ended.values():
            first = first or children.exit_code(code)
        if first and not (asked and first == exit_codes.RETRY):  # the others still save
            ranks.end(_GRACE)
    return first


def _task(nodes: int, each: int, node: int, local: int) -> dict[str, str]:
    """The variables that srun would set for a task of this rank; empty outside of a Slurm task."""
    if "SLURM_PROCID" not in os.environ:
        return {}
    size, layout = str(nodes * each), f"{each}(x{nodes})" if nodes > 1 else str(each)
    found = {
        **{"SLURM_PROCID": str(node * each + local), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)},
        **{"SLURM_NTASKS": size, "SLURM_NPROCS": size, "SLURM_STEP_NUM_TASKS": size},
        **{"SLURM_NTASKS_PER_NODE": str(each), "SLURM_TASKS_PER_NODE": layout, "SLURM_STEP_TASKS_PER_NODE": layout},
        "SLURM_NNODES": str(nodes),
    }
    if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # of the one task that has started all ranks of the node
        found["SLURM_CPUS_PER_TASK"] = str(max(1, int(cores) // each))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:]))
