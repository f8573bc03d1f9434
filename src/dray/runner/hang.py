"""Finds a hang by heartbeats: each node saves what its ranks do, and the first node names the rank to blame.

Each node reads the heartbeats of its own ranks, and tells the first one that they make progress, or which rank is late.
In a step one late rank is enough. In any other phase the run hangs only if no rank of any node makes progress: the
others may wait for one that tokenizes, or loads.

Python's faulthandler writes the stacks of all threads on SIGABRT, also of a rank that spins or that is stopped, without
its help: PYTHONFAULTHANDLER has put it into every Python. The signal ends the rank, which would be ended anyway.

The first rank that ends wakes the others out of their collective. So all are stopped first, on all nodes, and each
handles SIGABRT where it was.
"""

from __future__ import annotations

import _thread  # nobody waits for these threads
import json
import os
import re
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from dray.contract import exit_codes, heartbeat, run_folder
from dray.contract.findings import Finding, counted
from dray.contract.node import proc_text
from dray.runner import children, heartbeats, records, say
from dray.runner.connections import Entered, Hung, Message, Progress, Seen
from dray.runner.heartbeats import Heartbeats, Late
from dray.runner.plan import Plan

Item = TypeVar("Item")

_LOOK_S, _TELL_S = 1.0, 5.0  # seconds between looks, and between two messages of progress
_EVIDENCE_S = 7.5  # for all nodes; what has not come by then is not there
_SAMPLES, _SAMPLE_S = 10, 0.03  # of a thread's state; one that runs may wait for a core, and is then runnable
_STOPPED_S = 2.0  # after so many seconds all ranks of all nodes are stopped
_TORCH_S, _ABORT_S = 0.7, 2.0  # for an answer of torch, and until the rank has ended
_LONGEST = 256 << 10  # bytes of one source
_FRAMES, _ENTRIES = 12, 50  # kept of a stack, and of the Flight Recorder
_FILE = re.compile(r'  File "((?!<frozen).*)", line (\d+) in (.*)')  # without importlib's own
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")  # of gloo, and of NCCL; a torch knows both, one or none
_SHOWN = 3  # innermost frames
_WRAPPERS = ("wrapper (", "wrapped (")
_C10D, _TORCHS = "torch/distributed/distributed_c10d.py:", ("torch/distributed/", "torch/nn/parallel/")
_STATES = {"stopped": "is stopped (SIGSTOP)", "unseen": "was not seen: its node did not answer", "ended": "has ended"}


class Hang:
    """The watch over one start of the ranks. `tell` sends a message to the first node; there, to all others."""

    def __init__(self, plan: Plan, restart: int, size: Callable[[str], int], tell: Callable[[Message], None]) -> None:
        self.begun: Finding | None = None
        self.named: Finding | None = None
        self.since = 0.0
        self._plan, self._tell = plan, tell
        self._folder = f"{plan.folder}/{run_folder.hang(restart)}"
        self._nodes = [name for name in plan.names for _ in plan.ranks]  # of each rank
        self._beats = Heartbeats(plan, size)
        self._progress = self._looks_at = self._tells_at = self._deadline = time.monotonic()
        self._seen: list[Seen] = []
        self._reported = False

    def look(self) -> None:
        """Look at the ranks about every second, and at once after a hang."""
        now = time.monotonic()
        if self.begun:
            self._collect(now)
        if self.begun or now < self._looks_at:
            return
        self._looks_at = now + _LOOK_S
        late = self._beats.look(now)
        self._progress = max(self._progress, self._beats.progress)
        if late:
            self._judge(late, now)
        if self._plan.me and now >= self._tells_at and now - self._progress <= _TELL_S:
            self._tells_at = now + _TELL_S
            self._tell(Progress(now - self._progress))

    def hear(self, message: Message) -> None:
        """Take another node's message."""
        now = time.monotonic()
        match message:
            case Hung(finding) if not self.begun:
                self._begin(finding, now)
            case Progress(ago):
                self._progress = max(self._progress, now - ago)
            case Late() if not self.begun:
                self._judge(message, now)
            case Seen(rank):
                self._seen[rank] = message

    def _judge(self, late: Late, now: float) -> None:
        """Have the first node decide whether this late rank proves a hang."""
        if self._plan.me:
            self._tell(late)
            return
        if not late.alone and now - self._progress <= late.limit:
            return
        node = self._nodes[late.rank]
        limit = f"{late.seconds:.0f} s (limit {late.limit:.0f} s)"
        finding = Finding(
            f"hang: rank {late.rank} on {node} has made no progress for {limit}",
            code=exit_codes.RETRY,
            node=node,
            rank=late.rank,
        )
        self._begin(finding, now)
        self._tell(Hung(finding))

    def _begin(self, finding: Finding, now: float) -> None:
        """Save what this node's ranks do; each has a thread, since one that is stopped answers nothing."""
        self.begun = finding
        self.since = time.time()
        self._deadline = now + _EVIDENCE_S
        say(f"{finding.problem}; all nodes save what their ranks do")
        self._seen = [Seen(rank, node, state="unseen") for rank, node in enumerate(self._nodes)]

        for rank in self._plan.ranks:
            file = f"{self._folder}/rank-{rank}.txt"
            _thread.start_new_thread(save_stacks, (self._seen, rank, self._plan, file, now))

    def _collect(self, now: float) -> None:
        """Tell what was seen of this node's ranks, once all are saved; the first node names the culprit."""
        seen = [self._seen[rank] for rank in self._plan.ranks] if self._plan.me else self._seen
        complete = all(rank.state != "unseen" for rank in seen)
        if not self._plan.me and (complete or now > self._deadline):
            self._name()
        elif complete and not self._reported:
            self._reported = True
            for rank in seen:
                self._tell(rank)

    def _name(self) -> None:
        """Name the rank to blame: the finding, and a record older than those of the ranks that dray then ended."""
        assert self.begun is not None
        blamed, what = find_culprit(self._seen)
        shown = blamed or Seen(self.begun.rank or 0)
        who = f"rank {shown.rank} on {shown.node} " if blamed else ""
        self.named = self.begun._replace(
            problem=f"hang: {who}{what}; {self.begun.problem.removeprefix('hang: ')}",
            where=f"{self._folder}/rank-{shown.rank}.txt",
            fix=f"see the stacks of all ranks in {self._folder}; docs/survive.md",
            node=shown.node,
            rank=shown.rank if blamed else None,
        )
        self.write_record(self.named, shown.frames)

    def write_record(self, finding: Finding, frames: tuple[str, ...] = ()) -> None:
        """Write failures/hang.json."""
        folder, why = self._plan.folder, finding.problem
        records.write_failure(folder, "hang", finding, finding.where, why=why, last_lines=[*frames], time=self.since)


def save_stacks(seen: list[Seen], rank: int, plan: Plan, file: str, began: float) -> None:
    """Write the file, end the rank's program and put down what was seen. All nodes begin at the same time."""
    from http.client import HTTPException  # noqa: PLC0415  few runs hang

    log = f"{plan.folder}/{run_folder.rank_log(rank)}"
    beat = heartbeats.of(plan, rank)
    found = seen[rank]._replace(state="ended" if beat.program < 0 else "")
    if beat.time:
        found = found._replace(step=beat.step, phase=heartbeat.PHASES[beat.phase])
    stacks, traces = "", {}
    if _is_below(beat.program):
        pythons = _pythons(beat.program)
        process = pythons[0] if pythons else beat.program
        found = found._replace(state=_state(process))
        for handler in _HANDLERS:
            with suppress(OSError, ValueError, LookupError, TypeError, HTTPException):
                entries = _flight_entries(heartbeat.socket(heartbeat.path(plan.scratch, rank)), handler)
                traces[handler] = json.dumps(entries[-_ENTRIES:], indent=1)
                found = found._replace(flight=(*found.flight, *entered_last(entries)))
        _signal(pythons, signal.SIGSTOP)
        time.sleep(max(0.0, began + _STOPPED_S - time.monotonic()))
        stacks = _abort(beat.program, pythons, lambda: heartbeats.of(plan, rank).program > 0, log)
        found = found._replace(frames=main_frames(stacks))
    text = f"rank {rank} on {found.node} {found.state}: {place(found)}\n"
    for name, content in {"stacks of all threads (faulthandler)": stacks, **traces}.items():
        text += f"\n== {name}\n{content[:_LONGEST].rstrip()}\n"
    records.put(file, text)
    seen[rank] = found


def main_frames(stacks: str) -> tuple[str, ...]:
    """The main thread's frames, innermost first; faulthandler writes that thread last."""
    lines = _FILE.findall(_THREAD.split(stacks)[-1])[:_FRAMES]
    return tuple(f"{function} ({path.rpartition('site-packages/')[2]}:{line})" for path, line, function in lines)


def entered_last(entries: list[dict[str, Any]]) -> list[Entered]:
    """The last collective that the rank entered in each process group of a Flight Recorder's trace, by each backend."""
    last: dict[tuple[str, str], Entered] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            group = entry["process_group"][0]
            backend, _, name = entry["profiling_name"].rpartition(":")
            waits = entry.get("retired") is False
            last[group, backend] = Entered(group, entry["collective_seq_id"], name, waits, backend)
    return list(last.values())


def _is_below(process: int) -> bool:
    """Whether this runner has started it: a program may write anything into its heartbeat."""
    look = [os.getpid()]
    for parent in look:
        below = children.below(parent)
        if process in below:
            return True
        look += below
    return False


def _pythons(program: int) -> list[int]:
    """The Pythons of the program that handle SIGABRT, as faulthandler does, without their own children."""
    pythons = []
    look = [program]
    for process in look:
        name = os.path.basename(os.path.realpath(f"/proc/{process}/exe"))
        if name.startswith("python") and children.handles(process, signal.SIGABRT):  # a shell's trap handles it too
            pythons.append(process)
        else:
            look += children.below(process)
    return pythons


def _state(process: int) -> str:
    """The state of its main thread: runs, sleeps, stopped or ended."""
    states = []
    for _ in range(_SAMPLES):
        states.append(proc_text(f"/proc/{process}/stat").rpartition(") ")[2][:1])
        time.sleep(_SAMPLE_S)
    ends = {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended", "": "ended"}
    return ends.get(states[-1], "runs" if states.count("R") > _SAMPLES / 2 else "sleeps")


def _flight_entries(path: str, handler: str) -> list[dict[str, Any]]:
    """Of a Flight Recorder, from torch's worker server in the rank, which needs no Python thread."""
    from http.client import HTTPConnection  # noqa: PLC0415  few runs hang

    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_TORCH_S)
        line.connect(path)
        connection = HTTPConnection("rank")
        connection.sock = line
        connection.request("POST", f"/handler/{handler}")
        entries: list[dict[str, Any]] = json.load(connection.getresponse())["entries"]
        return entries


def _abort(program: int, pythons: list[int], runs: Callable[[], bool], log: str) -> str:
    """End the processes; return what faulthandler has written to the rank's log."""
    with suppress(OSError), open(log, "rb") as written:
        written.seek(0, os.SEEK_END)
        for process in pythons:
            with suppress(OSError):
                # Not 0: where the kernel hands a core dump to a program, only 1 says that there is to be none.
                resource.prlimit(process, resource.RLIMIT_CORE, (1, 1))
        _signal(pythons, signal.SIGABRT)
        _signal(pythons, signal.SIGCONT)
        deadline = time.monotonic() + _ABORT_S
        while pythons and runs() and time.monotonic() < deadline:
            time.sleep(0.02)
        if runs():
            _signal([program], signal.SIGKILL)
        return written.read(_LONGEST).decode("utf-8", "replace")
    return ""


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(OSError):
            os.kill(process, number)


def find_culprit(seen: list[Seen]) -> tuple[Seen | None, str]:
    """The rank that holds up the others, and how it differs; None if no rank differs."""
    for difference, ranks in _differences(seen):
        if 0 < len(ranks) < max(2, len(seen)):  # a rank without others holds up itself
            return ranks[0], _sentence(difference, ranks[0], seen)
    return None, _sentence("no rank differs from the others", seen[0], seen)


def _differences(seen: list[Seen]) -> Iterator[tuple[str, list[Seen]]]:
    """What may tell ranks from the others, the surest first, and the ranks of which it is true."""
    for state, what in _STATES.items():
        yield what, [rank for rank in seen if rank.state == state]
    yield from _by_flight(seen)
    steps = grouped((rank for rank in seen if rank.step >= 0), lambda rank: rank.step)
    if len(steps) > 1:
        yield f"is behind the others, which are at step {max(steps)}", steps[min(steps)]
    yield "waits in no collective", [rank for rank in seen if not awaited(rank)]
    yield "waits in another collective", _rarest(seen, awaited)
    yield "runs, and the others sleep", [rank for rank in seen if rank.state == "runs"]
    yield "is at another place than the others", _rarest(seen, lambda rank: rank.frames[:1])


def _by_flight(seen: list[Seen]) -> Iterator[tuple[str, list[Seen]]]:
    """The ranks that have not entered a collective in which others of its group wait, or have entered another.

    A group may have two backends, such as nccl and gloo, and each of them numbers its own collectives.
    """
    flights = [(rank, entry) for rank in seen for entry in rank.flight]
    for (group, _), entered in grouped(flights, lambda flight: (flight[1].group, flight[1].backend)).items():
        kinds = grouped(entered, lambda flight: (flight[1].number, flight[1].name))
        number, name = min(reversed(kinds), key=lambda kind: (kind[0], len(kinds[kind])))
        waiting = [entry for _, entry in entered if entry.waits and (entry.number, entry.name) != (number, name)]
        if waiting:
            last = max(waiting, key=lambda entry: entry.number)
            where = f"collective {number} of group {group}, and others {last.name}, collective {last.number}"
            yield f"has last entered {name}, {where}", [rank for rank, _ in kinds[number, name]]


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """The items by this key."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _rarest(seen: list[Seen], key: Callable[[Seen], object]) -> list[Seen]:
    """The ranks with the rarest value; of two equally rare values, the later ranks."""
    return min(reversed(grouped(seen, key).values()), key=len)


def _sentence(difference: str, shown: Seen, seen: list[Seen]) -> str:
    """The difference with the place of the rank, and where ranks wait."""
    text = f"{difference}: {place(shown)}".removesuffix(": ")
    for collective, count in Counter(filter(None, map(awaited, seen))).most_common(2):
        text += f"; waiting in {collective}: {counted(count, 'rank')}"
    return text


def awaited(rank: Seen) -> str:
    """The collective in which the rank waits, by its stack; empty if that shows none."""
    innermost = "".join(rank.frames[:1])
    if any(folder in innermost for folder in _TORCHS):
        collectives = [frame for frame in rank.frames if _C10D in frame and not frame.startswith(_WRAPPERS)]
        return (collectives or rank.frames)[0].partition(" ")[0]
    backward = innermost.startswith("_engine_run_backward ") and rank.state == "sleeps"
    return "the backward pass" if backward else ""


def place(rank: Seen) -> str:
    """The rank's step, phase and innermost frames, in words."""
    parts = [f"at step {rank.step}"] if rank.step >= 0 else []
    if rank.phase not in ("", "step"):
        parts.append(f"in phase {rank.phase}")
    if frames := [frame for frame in rank.frames if not frame.startswith(_WRAPPERS)]:
        parts.append(f"in {', called by '.join(frames[:_SHOWN])}")
    return ", ".join(parts)
