"""Keeps one rank: its log, its exit code, and why it died. Started by file, without site-packages: 10 ms, 8 MB.

The launchers below torchrun's level answer 1 for every failure, so the rank's own code would be lost without this.
"""

import os
import signal
import sys


def main(folder: str, world_size: str, command: list[str]) -> int:
    """Run the command with both streams in logs/rank-N.log; record it if it dies by itself."""
    rank = os.environ.get("RANK", "")
    log = f"{folder}/logs/rank-{rank or 'unknown'}.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if not rank or os.environ.get("WORLD_SIZE") != world_size:
        found = f"RANK={rank or '(not set)'} WORLD_SIZE={os.environ.get('WORLD_SIZE', '(not set)')}"
        return _failed(
            folder, rank, 78, f"the launcher made another world: {found}, the plan has {world_size} ranks", log
        )
    child = os.fork()
    if child == 0:
        _become(command)
    stopped = []

    def pass_on(number: int, _frame: object) -> None:
        stopped.append(number)
        os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, pass_on)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return 0
    if not stopped:  # a rank that the launcher stopped is not the cause
        why = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        return _failed(folder, rank, code if code > 0 else 128 - code, why, log)
    return code if code > 0 else 128 - code


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _failed(folder: str, rank: str, code: int, why: str, log: str) -> int:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from dray.runner import record  # only a rank that died pays for it  # noqa: PLC0415

    record.write(
        folder,
        f"rank-{rank or 'unknown'}",
        node=os.environ.get("DRAY_NODE_NAME", os.environ.get("SLURMD_NODENAME", "")),
        rank=int(rank) if rank.isdigit() else None,
        code=code,
        why=why,
        log=log,
        last_lines=record.tail(log),
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
