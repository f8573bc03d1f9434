"""Supervises one rank: its cores, its log, its exit code, why it died. Started by file, without site-packages: 20 ms.

A launcher such as torchrun answers 1 for every failure, so the rank's own code would be lost without this.
"""

from __future__ import annotations

import os
import signal
import sys
import time

# By file, since -m would look for dray where -S and -E have forbidden it. What Python itself has comes first.
if __name__ == "__main__":
    sys.path[:] = [*sys.path[1:], os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

from dray.contract import cores, exit_codes, heartbeat, run_folder
from dray.runner import children

TYPE_CHECKING = False  # typing's own would cost more than all else here
if TYPE_CHECKING:
    from dray.runner import output

_GRACE = 10.0  # seconds from the launcher's death to the rank's


def main(folder: str, world_size: str, node: str, command: list[str]) -> int:
    """Run the command with both streams in logs/rank-N.log; record it if it fails by itself."""
    rank = os.environ.get("RANK", "")
    log = f"{folder}/{run_folder.rank_log(rank or 'unknown')}"
    place = Place(folder, rank, node, log)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if not rank or os.environ.get("WORLD_SIZE") != world_size:
        found = f"RANK={rank or '(not set)'} WORLD_SIZE={os.environ.get('WORLD_SIZE', '(not set)')}"
        why = f"the launcher started another world size: {found}, the plan has {world_size} ranks"
        return _failed(place, exit_codes.CONFIG, why)
    _bind()
    if restarts := os.environ.pop("DRAY_RESTARTS", ""):  # the runners', and not the launcher's own, which are 0
        count, _, most = restarts.partition("/")
        os.environ |= {"TORCHELASTIC_RESTART_COUNT": count, "TORCHELASTIC_MAX_RESTARTS": most}
    # Launchers give each rank a session of its own, so a launcher that is killed would leave them running.
    launcher = children.die_with_parent()
    ranks = children.Children()
    between, beat = _filter(), _heartbeat(rank)
    try:
        ranks.start(command, on_parent_death=signal.SIGKILL, output=between.writer if between else None)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        code = 127 if isinstance(error, FileNotFoundError) else 126
        return _failed(place, code, children.ended_with(code))
    stopped, asked, code = False, False, 0
    _note(beat, *map(heartbeat.PROGRAM.pack, ranks.running))
    if between:
        between.watch(ranks)
    while ranks.running:
        events = ranks.wait()
        for number in events.signals:
            if number == signal.SIGUSR1:
                asked = True
                ranks.ask()
            else:
                stopped = True
                ranks.tell(number)
        if stopped and os.getppid() != launcher:
            ranks.end(_GRACE)
        code = events.ended.get(0, 0)
    seen = time.time()
    if between:
        between.finish()
    _note(beat, heartbeat.ended(code))
    if code == 0 or stopped:  # a rank that was stopped is no cause
        return children.exit_code(code)
    why = "it was asked to save and end" if asked and code == exit_codes.RETRY else children.ended_with(code)
    return _failed(place, children.exit_code(code), why, seen)


class Place:
    """A rank, and where its log and record are."""

    def __init__(self, folder: str, rank: str, node: str, log: str) -> None:
        self.folder, self.rank, self.node, self.log = folder, rank, node, log


def _filter() -> output.Filter | None:
    """The filter between the rank and its log, if pass_env names variables."""
    if not os.environ.get("DRAY_PASSED"):
        return None
    from dray.runner import output  # noqa: PLC0415  5 ms, which other ranks need not wait for

    return output.between()


def _heartbeat(rank: str) -> int:
    """Create the empty file in which the runner looks for the rank's program and steps; -1 if there is none."""
    folder = os.environ.pop(heartbeat.FOLDER, "")
    if not folder:
        return -1
    path = heartbeat.path(folder, rank)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.pwrite(file, bytes(heartbeat.SIZE), 0)  # no hole: on a full disk the rank's own write would be a SIGBUS
    except OSError as error:
        print(f"dray: this rank has no heartbeat: {path}: {error.strerror}", file=sys.stderr, flush=True)
        return -1
    os.environ[heartbeat.VARIABLE] = path
    return file


def _note(beat: int, *program: bytes) -> None:
    if beat >= 0:
        os.pwrite(beat, b"".join(program), 0)


def _bind() -> None:
    """Move to this rank's share of the node's cores, if the runner has found one."""
    shares, local = os.environ.pop("DRAY_CORES", ""), os.environ.get("LOCAL_RANK", "")
    if not shares or not local.isdigit() or int(local) > shares.count(";"):
        return
    try:
        os.sched_setaffinity(0, cores.parse(shares.split(";")[int(local)]))
    except (OSError, ValueError) as error:
        print(f"dray: this rank is not bound to its cores: {error}", file=sys.stderr, flush=True)


def _failed(place: Place, code: int, why: str, seen: float | None = None) -> int:
    number = int(place.rank) if place.rank.isdigit() else None
    name, seen = f"rank-{place.rank or 'unknown'}", seen or time.time()
    try:
        from dray.contract import files  # only a rank that died pays for these  # noqa: PLC0415
        from dray.runner import record  # noqa: PLC0415
    except Exception as error:  # the image's mount has gone away under the rank, with all that is not loaded
        why = f"{why}; the image is gone: {error}"
        _failed_alone(f"{place.folder}/{run_folder.failure(name)}", place.node, number, code, why, seen)
        return code
    told = {"rank": number, "code": code, "why": why, "log": place.log, "last_lines": files.tail(place.log)}
    record.write(place.folder, name, node=place.node, time=seen, **told)
    return code


def _failed_alone(target: str, node: str, rank: int | None, code: int, why: str, seen: float) -> None:
    """Write the record without importing anything; the lines of the log are read later."""

    def quoted(text: str) -> str:
        plain = (letter.isascii() and letter.isalnum() for letter in text)
        letters = (one if ok else f"\\u{min(ord(one), 0xFFFD):04x}" for one, ok in zip(text, plain, strict=True))
        return f'"{"".join(letters)}"'

    number = "null" if rank is None else rank
    text = f'{{"time": {seen}, "node": {quoted(node)}, "rank": {number}, "code": {code}, "why": {quoted(why)}, '
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(file, f'{text}"log": null, "last_lines": []}}\n'.encode())
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
