"""Keeps one rank: its cores, its log, its exit code, and why it died. Started by file, without site-packages: 20 ms.

A launcher such as torchrun answers 1 for every failure, so the rank's own code would be lost without this.
"""

import ctypes
import os
import signal
import sys

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def main(folder: str, world_size: str, node: str, command: list[str]) -> int:
    """Run the command with both streams in logs/rank-N.log; record it if it dies by itself."""
    rank = os.environ.get("RANK", "")
    log = f"{folder}/logs/rank-{rank or 'unknown'}.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if not rank or os.environ.get("WORLD_SIZE") != world_size:
        found = f"RANK={rank or '(not set)'} WORLD_SIZE={os.environ.get('WORLD_SIZE', '(not set)')}"
        why = f"the launcher made another world: {found}, the plan has {world_size} ranks"
        return _failed(folder, rank, node, 78, why, log)
    _take_place()
    # A launcher may have started all ranks again: what this one died of before was no end.
    record = f"{folder}/failures/rank-{rank}.json"
    if os.path.exists(record):
        os.unlink(record)
    # Launchers give each rank a session of its own, so a launcher that is killed would leave them running.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # Until the handlers are there, a signal waits: it would end the keeper and leave no word of the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if child == 0:
        _become(command)
    stopped = []

    def pass_on(number: int, _frame: object) -> None:
        stopped.append(number)
        os.kill(child, number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    # Waiting without reaping: until the handlers are off, the child's number must not become another process's.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return 0
    why = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    code = code if code > 0 else 128 - code
    return code if stopped else _failed(folder, rank, node, code, why, log)  # a rank that was stopped is no cause


def _take_place() -> None:
    """Move to this rank's share of the node's cores, where the runner has found one."""
    shares, local = os.environ.pop("DRAY_CORES", ""), os.environ.get("LOCAL_RANK", "")
    if not shares or not local.isdigit() or int(local) > shares.count(";"):
        return
    mine: set[int] = set()
    for part in shares.split(";")[int(local)].split(","):
        first, _, last = part.partition("-")
        mine.update(range(int(first), int(last or first) + 1))
    try:
        os.sched_setaffinity(0, mine)
    except OSError as error:
        print(f"dray: this rank is not bound to its cores: {error}", file=sys.stderr, flush=True)


def _become(command: list[str]) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _failed(folder: str, rank: str, node: str, code: int, why: str, log: str) -> int:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from dray.runner import record  # only a rank that died pays for it  # noqa: PLC0415

    number = int(rank) if rank.isdigit() else None
    name = f"rank-{rank or 'unknown'}"
    record.write(folder, name, node=node, rank=number, code=code, why=why, log=log, last_lines=record.tail(log))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
