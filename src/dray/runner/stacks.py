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
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

from dray.contract import heartbeat, run_folder
from dray.contract.node import proc_text
from dray.runner import children, failure_record, heartbeats
from dray.runner.culprit import Entered, Seen
from dray.runner.plan import Plan

_SAMPLES, _SAMPLE_S = 10, 0.03  # of a thread's state; one that runs may wait for a core, and is then runnable
_STOPPED_S = 2.0  # after so many seconds all ranks of all nodes are stopped
_TORCH_S, _ABORT_S = 0.7, 2.0  # for an answer of torch, and until the rank has ended
_LONGEST = 256 << 10  # bytes of one source
_FRAMES, _ENTRIES = 12, 50  # kept of a stack, and of the Flight Recorder
_FILE = re.compile(r'  File "((?!<frozen).*)", line (\d+) in (.*)')  # without importlib's own
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")  # of gloo, and of NCCL; a torch knows both, one or none


def save(seen: list[Seen], rank: int, plan: Plan, file: str, began: float) -> None:
    """Write the file, end the rank's program and put down what was seen. All nodes begin at the same time."""
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
                entries = _entries(heartbeat.socket(heartbeat.path(plan.scratch, rank)), handler)
                traces[handler] = json.dumps(entries[-_ENTRIES:], indent=1)
                found = found._replace(flight=(*found.flight, *entered_last(entries)))
        _signal(pythons, signal.SIGSTOP)
        time.sleep(max(0.0, began + _STOPPED_S - time.monotonic()))
        stacks = _abort(beat.program, pythons, lambda: heartbeats.of(plan, rank).program > 0, log)
        found = found._replace(frames=frames(stacks))
    text = f"rank {rank} on {found.node} {found.state}: {found.place}\n"
    for name, content in {"stacks of all threads (faulthandler)": stacks, **traces}.items():
        text += f"\n== {name}\n{content[:_LONGEST].rstrip()}\n"
    failure_record.put(file, text)
    seen[rank] = found


def frames(stacks: str) -> tuple[str, ...]:
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


def _entries(path: str, handler: str) -> list[dict[str, Any]]:
    """Of a Flight Recorder, from torch's worker server in the rank, which needs no Python thread."""
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
