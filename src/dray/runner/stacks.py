"""Saves what a hung rank does, before it is ended: its stacks, its state, its collectives.

Python's faulthandler writes the stacks of all threads on SIGABRT, also of a rank that spins or that is stopped, without
its help: PYTHONFAULTHANDLER has put it into every Python. The signal ends the rank, which would be ended anyway.

The first rank that ends wakes the others out of their collective. So all are stopped first, on all nodes, and each
handles SIGABRT where it was.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from dray.contract import heartbeat, run_folder
from dray.runner import children
from dray.runner.culprit import Entered, Seen
from dray.runner.heartbeats import Beat

_SAMPLES, _SAMPLE_S = 10, 0.03  # of a thread's state; one that runs may wait for a core, and is then runnable
_STOPPED_S = 2.0  # after so many seconds, and those of the tools, all ranks of all nodes are stopped
_TORCH_S, _TOOLS_S, _ABORT_S = 1.5, 2.5, 2.0  # for all questions, for all tools, and until the rank has ended
_LONGEST = 256 << 10  # bytes of one source
_ANSWER = 8 << 20  # bytes of the Flight Recorder's
_FRAMES, _FRAME, _ENTRIES = 12, 200, 50  # kept of a stack, characters of one, and kept of the Flight Recorder
_FILE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")  # of gloo, and of NCCL; a torch knows both, one or none
_TOOLS: tuple[tuple[str, ...], ...] = (("py-spy", "dump", "--native", "--pid", "{process}"), ("ncclras", "-v"))


class Place(NamedTuple):
    """A rank, its node and its files."""

    rank: int
    node: str
    log: str
    beat: str
    """Its heartbeat file."""
    file: str
    """The file to write."""


def save(at: Place, beat: Beat, began: float) -> Seen:
    """Write the file, end the rank's program and return what was seen. All nodes begin at the same time."""
    known = Seen(at.rank, at.node, beat.step if beat.time else -1, heartbeat.PHASES[beat.phase] if beat.time else "")
    program = beat.program if beat.program <= 0 or _is_below(beat.program) else 0
    if program <= 0:
        seen = known._replace(state="ended" if program else "")
        parts = {"state": f"the program has ended with {-1 - program}" if program else "no program was started"}
    else:
        python = _pythons(program)
        main = python[0] if python else program
        state = _state(main)
        tools = [tool for tool in _TOOLS if shutil.which(tool[0])]
        flight, told = {}, {}
        if state != "stopped":  # which nobody can ask
            flight, told = _flight(heartbeat.socket(at.beat)), _ask(tools, main)
        parts = {"state": f"{state}, process {main}", "threads": _threads(main)}
        _signal(python, signal.SIGSTOP)
        parts |= {name: json.dumps(newest(trace), indent=1) for name, trace in flight.items()} | told
        time.sleep(max(0.0, began + _STOPPED_S + _TOOLS_S * bool(tools) - time.monotonic()))
        stacks = _abort(program, python, at)
        entered = tuple(one for trace in flight.values() for one in entered_last(trace))
        seen = known._replace(state=state, frames=frames(stacks), flight=entered)
        parts = {"stacks of all threads (faulthandler)": stacks, **parts}
    head = f"rank {at.rank} on {at.node}, step {seen.step}, {seen.phase or 'no heartbeat'}\n"
    text = head + "".join(f"\n== {name}\n{content[:_LONGEST].rstrip()}\n" for name, content in parts.items())
    with suppress(OSError):  # a disk that is full must not hide the rank
        os.makedirs(os.path.dirname(at.file), exist_ok=True)
        with open(at.file, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    return seen


def frames(stacks: str) -> tuple[str, ...]:
    """The main thread's frames, innermost first; faulthandler writes that thread last."""
    found = _FILE.findall(_THREAD.split(stacks)[-1])
    return tuple(f"{path}:{line} {function}"[-_FRAME:] for path, line, function in found[:_FRAMES])


def newest(trace: Any) -> Any:  # noqa: ANN401  any JSON value
    """A Flight Recorder's trace with only its last entries."""
    entries = trace.get("entries") if isinstance(trace, dict) else None
    return {**trace, "entries": entries[-_ENTRIES:]} if isinstance(entries, list) else trace


def entered_last(trace: Any) -> list[Entered]:  # noqa: ANN401  any JSON value
    """The last collective that the rank entered in each process group of a Flight Recorder's trace."""
    last: dict[str, Entered] = {}
    for entry in trace.get("entries", ()) if isinstance(trace, dict) else ():
        with suppress(KeyError, TypeError, ValueError, IndexError):
            name, number = entry["process_group"], int(entry["collective_seq_id"])
            group = str(name[0] if isinstance(name, list) else name)[:60]
            if not entry.get("is_p2p") and (group not in last or number >= last[group].number):
                called = str(entry["profiling_name"]).rpartition(":")[2][:60]
                last[group] = Entered(group, number, called, waits=entry.get("retired") is False)
    return list(last.values())


def _is_below(process: int) -> bool:
    """Whether this process has started it: a corrupt heartbeat must not get another process killed."""
    own = os.getpid()
    while process > 1 and process != own:
        parent = _line(f"/proc/{process}/stat").rpartition(")")[2].split()[1:2]
        process = int(parent[0]) if parent else 0
        if process == own:
            return True
    return False


def _pythons(program: int) -> list[int]:
    """The processes of the program that have faulthandler, without their own children."""
    found, look = [], [program]
    for process in look:
        try:
            name = os.path.basename(os.readlink(f"/proc/{process}/exe"))
        except OSError:  # it has ended
            continue
        if name.startswith("python") and children.handles(process, signal.SIGABRT):
            found.append(process)
        else:
            look += children.below(process)
    return found


def _state(process: int) -> str:
    """The state of its main thread: runs, sleeps, stopped or ended."""
    seen = []
    for _ in range(_SAMPLES):
        seen.append(_line(f"/proc/{process}/task/{process}/stat").rpartition(")")[2].strip()[:1])
        time.sleep(_SAMPLE_S)
    if seen[-1] in ("T", "t"):
        return "stopped"
    if seen[-1] in ("", "Z", "X"):
        return "ended"
    return "runs" if seen.count("R") > _SAMPLES / 2 else "sleeps"


def _threads(process: int) -> str:
    """What the kernel says of each thread: its name, its state and where it waits."""
    lines = []
    with suppress(OSError):
        for thread in sorted(map(int, os.listdir(f"/proc/{process}/task")))[:128]:
            of = f"/proc/{process}/task/{thread}"
            name, state = _line(f"{of}/comm"), _line(f"{of}/stat").rpartition(")")[2].split()[:1]
            waits = [text for file in ("wchan", "syscall") if (text := _line(f"{of}/{file}")) not in ("", "0")]
            lines.append(f"{thread} {name} {''.join(state)} {' '.join(waits)}")
    return "\n".join(lines)


def _line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:  # ended, or not this user's to read
        return ""


def _flight(path: str) -> dict[str, Any]:
    """The traces of torch's Flight Recorders, from torch's worker server in the rank, which needs no Python thread."""
    found, deadline = {}, time.monotonic() + _TORCH_S
    if os.path.exists(path):
        for handler in _HANDLERS:
            with suppress(OSError, ValueError):
                found[handler] = json.loads(_answer(path, handler, deadline))
    return found


def _answer(path: str, handler: str, deadline: float) -> bytes:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_left(deadline))
        line.connect(path)
        line.sendall(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
        data = b""
        while (more := line.recv(1 << 20)) and len(data) < _ANSWER:
            data += more
            line.settimeout(_left(deadline))
    head, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError(head[:100])
    return body


def _ask(tools: list[tuple[str, ...]], process: int) -> dict[str, str]:
    """Native stacks and NCCL's communicators, if the image or a layer has the tools for them."""
    found, deadline = {}, time.monotonic() + _TOOLS_S
    for tool in tools:
        argv = [word.format(process=process) for word in tool]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(  # noqa: S603  our own list
                argv, capture_output=True, timeout=_left(deadline), check=False, errors="replace"
            )
            found[" ".join(argv)] = done.stdout + done.stderr
    return found


def _left(deadline: float) -> float:
    """The seconds left; OSError if there are none."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _abort(program: int, pythons: list[int], at: Place) -> str:
    """End the processes; return what faulthandler has written to the rank's log."""
    begin = _size(at.log)
    for process in pythons:
        with suppress(OSError, ValueError):
            # Not 0: where the kernel hands a core dump to a program, only 1 says that there is to be none.
            resource.prlimit(process, resource.RLIMIT_CORE, (1, 1))
    _signal(pythons, signal.SIGABRT)
    _signal(pythons, signal.SIGCONT)
    deadline = time.monotonic() + _ABORT_S
    while pythons and _runs(at.beat) and time.monotonic() < deadline:
        time.sleep(0.02)
    if _runs(at.beat):
        with suppress(OSError):
            os.kill(program, signal.SIGKILL)
    with suppress(OSError), open(at.log, "rb") as log:
        log.seek(begin)
        return log.read(_LONGEST).decode("utf-8", "replace")
    return ""


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(OSError):
            os.kill(process, number)


def _runs(beat: str) -> bool:
    """Whether the rank's supervisor has not seen its program end."""
    try:
        with open(beat, "rb", buffering=0) as file:
            return bool(heartbeat.PROGRAM.unpack(file.read(heartbeat.PROGRAM.size))[0] > 0)
    except (OSError, ValueError):
        return False


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def places(plan: Mapping[str, Any], restart: int, name: str, ranks: range) -> list[Place]:
    """The files of each rank of this node."""
    folder, scratch, found = plan["folder"], plan["scratch"], []
    for rank in ranks:
        log, file = f"{folder}/{run_folder.rank_log(rank)}", f"{folder}/{run_folder.hang(restart)}/rank-{rank}.txt"
        found.append(Place(rank, name, log, heartbeat.path(scratch, rank), file))
    return found
