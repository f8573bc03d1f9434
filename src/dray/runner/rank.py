"""Supervises one rank: its cores, its log, its exit code, why it died. Started by file, without site-packages: 20 ms.

A launcher such as torchrun answers 1 for every failure, so the rank's own code would be lost without this.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from _json import encode_basestring_ascii as quoted  # json's own, without the 5 ms of the rest

# By file, since -m would look for dray where -S and -E have forbidden it. What Python itself has comes first.
if __name__ == "__main__":
    sys.path[:] = [*sys.path[1:], os.path.abspath(f"{__file__}/../../..")]

from dray.contract import exit_codes, heartbeat, ranges, run_folder
from dray.runner import children, ranks, say


def main(folder: str, world_size: str, node: str, *command: str) -> int:
    """Run the command with both streams in logs/rank-N.log; record it if it fails by itself."""
    rank, size = (os.environ.get(name, "unknown") for name in ("RANK", "WORLD_SIZE"))
    log = f"{folder}/{run_folder.rank_log(rank)}"
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if rank.isdigit() and size == world_size:
        code, why = _supervise(rank, [*command])
    else:
        code = exit_codes.CONFIG
        why = f"the launcher started another world size: RANK={rank} WORLD_SIZE={size}, the plan has {world_size} ranks"
    if why:
        _record(folder, node, rank, log, code, why)
    return code


def _supervise(rank: str, command: list[str]) -> tuple[int, str]:
    """Run the command; return its exit code, and why it failed: empty if it did not, or was stopped."""
    _bind()
    if restarts := os.environ.pop("DRAY_RESTARTS", ""):  # the runners', and not the launcher's own, which are 0
        os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"] = restarts.split("/")
    # Launchers give each rank a session of its own, so a launcher that is killed would leave them running.
    launcher = children.die_with_parent()
    started = children.Children()
    beat, between = _heartbeat(rank), None
    if os.environ.get("DRAY_PASSED"):
        from dray.runner import redact  # noqa: PLC0415  5 ms, which other ranks need not wait for

        between = redact.between()
    try:
        started.start(command, on_parent_death=signal.SIGKILL, output=between.writer if between else None)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        code = 127 if isinstance(error, FileNotFoundError) else 126
        return code, children.ended_with(code)
    os.pwrite(beat, heartbeat.PROGRAM.pack(*started.running), 0)
    if between:
        between.watch(started)
    heard: set[int] = set()
    code = 0
    while started.running:
        signals, ended = started.wait()
        heard.update(signals)
        ranks.pass_on(signals, started, launcher)
        code = ended.get(0, 0)
    if between:
        between.finish()
    os.pwrite(beat, heartbeat.ended(code), 0)
    if code == 0 or heard - {signal.SIGUSR1}:  # a rank that was stopped is no cause
        return children.exit_code(code), ""
    if heard and code == exit_codes.RETRY:
        return code, "it was asked to save and end"
    return children.exit_code(code), children.ended_with(code)


def _heartbeat(rank: str) -> int:
    """Open the file in which the runner looks for the rank's program and steps; /dev/null if there is none."""
    if folder := os.environ.pop(heartbeat.FOLDER, ""):
        path = heartbeat.path(folder, rank)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            os.pwrite(file, bytes(heartbeat.SIZE), 0)  # no hole: on a full disk the rank's own write would be a SIGBUS
        except OSError as error:
            say(f"this rank has no heartbeat: {path}: {error.strerror}")
        else:
            os.environ[heartbeat.VARIABLE] = path
            return file
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _bind() -> None:
    """Move to this rank's share of the node's cores, if the runner has found one."""
    if shares := os.environ.pop("DRAY_CORES", ""):
        try:
            os.sched_setaffinity(0, ranges.parse(shares.split(";")[int(os.environ["LOCAL_RANK"])]))
        except (OSError, ValueError, LookupError) as error:
            say(f"this rank is not bound to its cores: {error}")


def _record(folder: str, node: str, rank: str, log: str, code: int, why: str) -> None:
    now, name = time.time(), f"rank-{rank}"
    number = int(rank) if rank.isdecimal() else None
    try:
        from dray.contract.findings import Finding  # only a rank that died pays for these  # noqa: PLC0415
        from dray.runner import records  # noqa: PLC0415
    except Exception as error:  # the image's mount has gone away under the rank, with all that is not loaded
        known = f'"time": {now}, "node": {quoted(node)}, "rank": {"null" if number is None else number}, "code": {code}'
        why = quoted(f"{why}; the image is gone: {error}")
        target = f"{folder}/{run_folder.failure(name)}"
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "w", encoding="utf-8") as file:  # the log is read later
                file.write(f'{{{known}, "why": {why}, "log": null, "last_lines": []}}\n')
        except OSError as refused:
            say(f"{target} cannot be written: {refused}")
    else:
        records.write_failure(folder, name, Finding(why, code=code, node=node, rank=number), log, time=now)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
