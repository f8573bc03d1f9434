"""The node check: before the rendezvous each node checks itself, without the others.

Each check of a GPU or a disk is a process of its own: a driver call that never returns must not hold up the runner. At
the deadline it is killed; one that survives SIGKILL is left alone and named.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from dray.contract import exit_codes, run_folder, startup
from dray.contract.findings import Finding, counted
from dray.runner import children

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PYTHON = ("-S", "-E", "-B")  # a check leaves no bytecode on a disk that may be full
_ENDING_S = 2.0  # from SIGKILL to the end of what can end
_CHUNK = 65536
_LINE = 256  # letters that the other nodes hear
LOADING = "import torch"  # no fault of a GPU: the image is read from a busy disk


def limit(world: Mapping[str, Any]) -> float:
    """Seconds that a node's check may take: half of the time for which the others wait in the rendezvous."""
    return float(world["rendezvous_timeout_s"]) / 2


class Part:
    """A process that checks a part of this node, and its findings so far."""

    def __init__(self, name: str, argv: list[str]) -> None:
        self.name, self.argv = name, argv
        self.phase, self._since = "its start", time.monotonic()
        self.found: list[Finding] = []
        self.tflops = 0.0
        self.reader = -1
        self._children: children.Children | None = None
        self._text, self._last = b"", ""

    def start(self, running: children.Children, label: int) -> None:
        """Start the check; `hear` reads its two streams."""
        self.reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            running.start(self.argv, label=label, env=env, on_parent_death=signal.SIGKILL, session=True, output=writer)
        finally:
            os.close(writer)
        running.watch(self.reader, self.hear)
        self._children = running

    def hear(self) -> None:
        """Read new output: JSON objects are the check's own lines, all others go to the log."""
        try:
            while self._children and (data := os.read(self.reader, _CHUNK)):
                *lines, self._text = (self._text + data).split(b"\n")
                for line in lines:
                    self._take(line)
        except BlockingIOError:
            return
        self.close()

    def close(self) -> None:
        """Stop reading."""
        if self._children:
            self._children.forget(self.reader)
            os.close(self.reader)
            self._children = None

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").strip()
        try:
            told = json.loads(text)
            if told.keys() == {"phase"}:
                self.phase, self._since = str(told["phase"]), time.monotonic()
            elif told.keys() == {"tflops"}:
                self.tflops = float(told["tflops"])
            else:
                self.found.append(Finding(**told["finding"]))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            self._last = text or self._last
            print(f"dray: {self.name}: {text}", flush=True)

    def ended(self, code: int) -> None:
        """Note that the check ended by itself, with this code."""
        self.hear()
        if code and not any(one.code for one in self.found):
            found = f"in: {self.phase}{f': {self._last}' * bool(self._last)}"
            self._unfit(f"{self.name}: the check ended: {children.ended_with(code)}", found)

    def hangs(self, seconds: float, *, left: bool) -> None:
        """Note that the check was killed at its deadline; it is `left` if SIGKILL did not end it."""
        moved = time.monotonic() - self._since < seconds / 2  # an earlier phase was slow, such as the import
        if not left and (self.phase == LOADING or moved):
            done = "torch was not loaded" if self.phase == LOADING else f"{self.phase} was not done"
            self.found.append(Finding(f"{self.name} is not checked: {done} within {seconds:.0f} s"))
            return
        stays = "; SIGKILL does not end it either" if left else ""
        self._unfit(f"{self.name}: no answer within {seconds:.0f} s", f"hangs in: {self.phase}{stays}")

    def _unfit(self, problem: str, found: str) -> None:
        fix = "leave this node out (sbatch --exclude), and tell the administrators"
        wanted = "a check that ends in time"
        self.found.append(Finding(problem, wanted=wanted, found=found, fix=fix, code=exit_codes.UNFIT))


def parts(plan: Mapping[str, Any]) -> list[Part]:
    """The check of the node itself, and one for each rank's GPU."""
    path = f"{plan['folder']}/{run_folder.PLAN}"
    found = [Part("node", [sys.executable, *_PYTHON, f"{_FOLDER}/node_checks.py", path])]
    if plan["variant"] != "cpu":
        gpu = [sys.executable, "-m", "dray.checks.gpu", path]
        found += [Part(f"GPU {local}", [*gpu, str(local)]) for local in range(plan["world"]["ranks_per_node"])]
    return found


def node(plan: Mapping[str, Any], me: int, measured: dict[str, float] | None = None) -> Finding | None:
    """Why this node is unfit, if it is. Warnings are printed; `measured` gets the TFLOP/s of the slowest GPU."""
    began = time.monotonic()
    looked = parts(plan)
    run(looked, limit(plan["world"]))
    found = [one for part in looked for one in part.found]
    for one in found:
        if not one.code:
            print(f"dray: {one.level}: {one}", flush=True)
    print(f"dray: the node check took {time.monotonic() - began:.1f} s", flush=True)
    speeds = [part.tflops for part in looked if part.tflops > 0]
    if speeds and measured is not None:
        measured[startup.TFLOPS] = min(speeds)
    wrong = [one for one in found if one.code]
    if not wrong:
        return None
    first, name = wrong[0], plan["world"]["nodes"][me]["name"]
    if len(wrong) > 1:
        more = "\n".join(f"{one.problem}{f': {one.found}' * bool(one.found)}" for one in wrong)
        first = first._replace(problem=f"{first.problem}, and {counted(len(wrong) - 1, 'more finding')}", found=more)
    return first._replace(node=name, code=exit_codes.UNFIT)


def line(found: Finding | None) -> str:
    """The finding as one line for the other nodes; empty if this node is fit."""
    return " ".join(found.problem.split())[:_LINE] if found else ""


def run(looked: list[Part], seconds: float) -> None:
    """Run all checks at once; kill those that have not ended after these seconds."""
    running, deadline = children.Children(), time.monotonic() + seconds
    try:
        for label, part in enumerate(looked):
            part.start(running, label)
        while running.running and (left := deadline - time.monotonic()) > 0:
            events = running.wait(left)
            if events.signals:  # the run is stopped from outside: that is no finding of this node's
                sys.exit(128 + events.signals[0])
            for label, code in events.ended.items():
                looked[label].ended(code)
    finally:
        hang = dict(running.running)
        for process in hang:  # with what it has started, such as nvidia-smi
            try:
                os.killpg(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        ended, late = running.close(_ENDING_S)
        for number in late:  # nobody waits for them any more
            os.kill(os.getpid(), number)
        for part in looked:
            part.close()
    for process, label in hang.items():
        looked[label].hangs(seconds, left=not ended and os.path.exists(f"/proc/{process}"))
