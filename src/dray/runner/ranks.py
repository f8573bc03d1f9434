"""Starts a node's ranks without an agent, each in the variables that torch reads; started by file, in milliseconds.

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
    """Run the command once for each local rank; the first code that is not 0."""
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
        ranks.start(command, label=rank, env={**os.environ, **world}, session=True)
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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:]))
