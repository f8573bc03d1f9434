"""Starts a node's ranks without an agent, each in the variables that torch reads; started by file, in milliseconds.

One rank that dies ends the others, and its own exit code is this program's.
"""

import os
import signal
import sys
import time

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_GRACE = 10.0  # seconds from asking the other ranks to end to ending them


def main(nodes: int, each: int, node: int, master: str, port: str, command: list[str]) -> int:
    """Run the command once for each local rank; the first code that is not 0."""
    running: dict[int, int] = {}

    def pass_on(number: int, _frame: object) -> None:
        for child in running:
            os.kill(child, number)

    # Nobody may be asked to end before it is known here.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for number in _SIGNALS:
        signal.signal(number, pass_on)
    for local in range(each):
        rank = node * each + local
        world = {
            **{"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)},
            **{"WORLD_SIZE": str(nodes * each), "LOCAL_WORLD_SIZE": str(each)},
            **{"MASTER_ADDR": master, "MASTER_PORT": port},
        }
        # A session of its own, as torchrun's ranks have: a signal to the group comes from here alone.
        child = os.posix_spawn(command[0], command, {**os.environ, **world}, setsigmask=(), setsid=True)
        running[child] = rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return _wait(running)


def _wait(running: dict[int, int]) -> int:
    first, deadline = 0, 0.0
    while running:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | (os.WNOHANG if first else 0))
        if ended:
            # Between reaping and forgetting nobody may be signalled: its number may be another's by then.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            code = os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1])
            running.pop(ended.si_pid, None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            if code and not first:
                first, deadline = (code if code > 0 else 128 - code), time.monotonic() + _GRACE
                _tell(running, signal.SIGTERM)
        elif time.monotonic() > deadline:
            _tell(running, signal.SIGKILL)
            deadline += _GRACE
        else:
            time.sleep(0.01)
    return first


def _tell(running: dict[int, int], number: int) -> None:
    for child in running:
        os.kill(child, number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:]))
