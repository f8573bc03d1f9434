"""The preflight: each node checks itself before the rendezvous; after it, all ranks prove that they can communicate.

Both are done by one process for each rank, `dray.checks.rank`, since the import of torch is most of what it costs. A
driver call that never returns must not hold up the runner: at the deadline such a process is killed, and one that
survives SIGKILL is left alone and named. Once a node's ranks have ended, it sends their last reports to the first
node, which judges by those of all nodes, and tells all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dray.contract import exit_codes, findings, run_folder, startup
from dray.contract.findings import DrayError, Finding, UnfitError, counted
from dray.runner import children, control
from dray.runner.hello import StoppedError, check_limit_s

_PROGRAM = ("-B", "-m", "dray.checks.rank")  # -B: it leaves no bytecode on a disk that may be full
_LOADING = "import torch"  # no fault of a GPU: the image is read from a busy disk
_ENDING_S = 2.0  # from SIGKILL to the end of what can end
_CHUNK = 65536
_GRACE = 15.0  # seconds beyond the deadlines in which ranks that still can have ended by themselves
_LIMITS = "all ranks join within rendezvous_timeout_s, and end the collectives within preflight.timeout_s"
_OTHERS = 5.0  # seconds after the first failure in which the reports of all other ranks reach the first node
_STOOD = "see preflight/rank-*.stack and nccl-*.log in the run folder"


class RankCheck:
    """The check process of a rank, and what it has told so far."""

    def __init__(self, rank: int, part: str, argv: list[str], env: Mapping[str, str]) -> None:
        self.ready = False
        """Whether it waits for the other nodes, or has ended."""
        self.errors: list[Finding] = []
        self.tflops = 0.0
        self.report: dict[str, Any] = {
            "rank": rank, "part": part, "phase": "its start", "order": -1, "limit": 0, "time": 0.0,
        }  # fmt: skip
        self._argv, self._env = argv, env
        self._since, self._text = time.monotonic(), b""
        self._line: socket.socket | None = None

    def start(self, running: children.Children, label: int) -> None:
        """Start the process."""
        self._line, its_end = socket.socketpair()
        self._line.setblocking(False)
        with its_end:
            running.start(
                self._argv, label=label, env=self._env, on_parent_death=signal.SIGKILL, session=True,
                dialogue=its_end.fileno(),
            )  # fmt: skip
        self.watch(running)

    def watch(self, running: children.Children) -> None:
        """Have `wait` of these children read what the process tells."""
        self._children = running
        if self._line:
            running.watch(self._line.fileno(), self.hear)

    def go(self, environ: Mapping[str, str]) -> None:
        """Have it run the collectives, with these variables."""
        new = {name: value for name, value in environ.items() if self._env.get(name) != value}
        if self._line:
            with suppress(OSError):  # it has ended, which is seen next
                self._line.sendall(json.dumps(new).encode() + b"\n")

    def hear(self) -> None:
        """Read new lines: JSON objects are the check's own, all others go to the log."""
        try:
            while self._line and (data := self._line.recv(_CHUNK)):
                *lines, self._text = (self._text + data).split(b"\n")
                for line in lines:
                    self._take(line)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it has ended without reading "go"
            pass
        self.close()

    def close(self) -> None:
        """Stop reading."""
        if self._line:
            self._children.forget(self._line.fileno())
            self._line.close()
            self._line = None

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").strip()
        try:
            fields = json.loads(text)
            if "finding" in fields:
                self._note(Finding(**fields["finding"]))
            elif "tflops" in fields:
                self.tflops = float(fields["tflops"])
            elif "ready" in fields:
                self.ready = True
            else:
                self.report |= fields["progress"]
                self._since = time.monotonic()
        except (ValueError, TypeError, KeyError, RecursionError):
            print(f"dray: {self.report['part']}: {text}", flush=True)

    def _note(self, finding: Finding) -> None:
        if finding.code:
            self.errors.append(finding)
        else:
            print(f"dray: {finding.level}: {finding}", flush=True)

    def ended(self, code: int) -> None:
        """Note that the process has ended before the rendezvous, with this code."""
        self.hear()
        self.ready = True
        if code and not self.errors:
            crashed = self.report.get("crashed", "")
            found = f"in: {self.report['phase']}{': ' * bool(crashed)}{crashed}"
            self._unfit(f"the check ended: {children.ended_with(code)}", found)

    def hangs(self, seconds: float) -> bool:
        """Whether its phase has taken most of these seconds; only warn if not, and of the import."""
        phase = self.report["phase"]
        if phase != _LOADING and time.monotonic() - self._since >= seconds / 2:
            return True
        done = "torch was not loaded" if phase == _LOADING else f"{phase} was not done"
        self._note(Finding(f"{self.report['part']} is not checked: {done} within {seconds:.0f} s"))
        return False

    def killed(self, seconds: float, *, left: bool) -> None:
        """Note that the process was killed after these seconds; it is `left` if SIGKILL did not end it."""
        stays = "; SIGKILL does not end it either" if left else ""
        self._unfit(f"no answer within {seconds:.0f} s", f"hangs in: {self.report['phase']}{stays}")

    def _unfit(self, problem: str, found: str) -> None:
        self.errors.append(
            Finding(
                f"{self.report['part']}: {problem}",
                wanted="a check that ends in time",
                found=found,
                fix="leave this node out (sbatch --exclude), and tell the administrators",
                code=exit_codes.UNFIT,
            )
        )

    def last_report(self, code: int) -> dict[str, Any]:
        """How far it came in the collectives, and why no further; it has ended with this code."""
        self.hear()
        report = dict(self.report)
        # At its deadline it ends with code 1, without a word of its own.
        report["expired"] = code == 1 and "crashed" not in report and time.monotonic() >= report.get("expires", 1e99)
        if self.errors:
            report["finding"] = self.errors[0]._asdict()
        if code < 0:
            report["killed"] = signal.Signals(-code).name
        return report


def check_alone(ranks: Sequence[RankCheck], seconds: float) -> dict[int, int]:
    """Start all processes; return those that wait for the other nodes, with their local ranks: none after an error.

    One that hangs is killed after these seconds, with what it has started, such as nvidia-smi.
    """
    running, deadline = children.Children(), time.monotonic() + seconds
    swept, waiting = True, dict[int, int]()
    hanging: dict[int, RankCheck] = {}
    try:
        for local, rank in enumerate(ranks):
            rank.start(running, local)
        while not all(rank.ready for rank in ranks) and (left := deadline - time.monotonic()) > 0:
            events = running.wait(left)
            if events.signals:  # the run is stopped from outside: that is no finding of this node's
                sys.exit(128 + events.signals[0])
            for local, code in events.ended.items():
                ranks[local].ended(code)
        left_over = {process: ranks[local] for process, local in running.running.items() if not ranks[local].ready}
        hanging = {process: rank for process, rank in left_over.items() if rank.hangs(seconds)}
        if not hanging and not any(rank.errors for rank in ranks):
            waiting = dict(running.running)
    finally:
        if not waiting:
            for process in running.running:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
            swept = running.sweep(_ENDING_S)
            for rank in ranks:
                rank.close()
        for number in running.release():  # nobody waits for them any more
            os.kill(os.getpid(), number)
    for process, rank in hanging.items():
        rank.killed(seconds, left=not swept and os.path.exists(f"/proc/{process}"))
    return waiting


class Preflight:
    """The check processes of this node's ranks, before and after the rendezvous."""

    def __init__(self, plan: Mapping[str, Any], me: int) -> None:
        self._plan, self._me = plan, me
        self._waiting: dict[int, int] = {}
        argv = [sys.executable, *_PROGRAM, f"{plan['folder']}/{run_folder.PLAN}"]
        self.ranks = []
        for local, rank in enumerate(_of_node(plan, me)):
            part = "node" if not local else f"rank {rank}" if plan["variant"] == "cpu" else f"GPU {local}"
            env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(local)}
            self.ranks.append(RankCheck(rank, part, argv, env))

    def check_node(self, measured: dict[str, float]) -> Finding | None:
        """Why this node is unfit, if it is; `measured` gets the TFLOP/s of its slowest GPU."""
        began = time.monotonic()
        self._waiting = check_alone(self.ranks, check_limit_s(self._plan["world"]))
        print(f"dray: the node check took {time.monotonic() - began:.1f} s", flush=True)
        speeds = [rank.tflops for rank in self.ranks if rank.tflops > 0]
        if speeds:
            measured[startup.TFLOPS] = min(speeds)
        errors = [error for rank in self.ranks for error in rank.errors]
        if not errors:
            return None
        first, name = errors[0], self._plan["world"]["nodes"][self._me]["name"]
        if len(errors) > 1:
            every = "\n".join(f"{error.problem}{f': {error.found}' * bool(error.found)}" for error in errors)
            first = first._replace(
                problem=f"{first.problem}, and {counted(len(errors) - 1, 'more finding')}", found=every
            )
        return first._replace(node=name, code=exit_codes.UNFIT)

    def check_together(self, running: children.Children, environ: Mapping[str, str], links: control.Control) -> None:
        """Return if all ranks can communicate, else raise why."""
        plan, began = self._plan, time.monotonic()
        deadline = began + plan["world"]["rendezvous_timeout_s"] + plan["preflight"]["timeout_s"] + _GRACE
        try:
            os.makedirs(f"{plan['folder']}/{run_folder.PREFLIGHT}", exist_ok=True)
        except OSError as wrong:
            raise UnfitError(
                "the preflight cannot start",
                wanted=f"{plan['folder']} is writable on this node",
                found=wrong,
                fix="free space on that disk, and check your quota",
            ) from wrong
        running.running |= self._waiting
        self._waiting = {}
        for rank in self.ranks:
            rank.watch(running)
            rank.go(environ)
        codes = _wait(running, deadline, links)
        reports = [rank.last_report(codes.get(local, 0)) for local, rank in enumerate(self.ranks)]
        links.report_preflight(reports if any(codes.values()) else [])
        if not self._me:
            _judge(plan, running, links, deadline + _GRACE)
        elif any(codes.values()):
            _hear_judgement(running, links, deadline + 3 * _GRACE)
        if links.stopped:  # by a signal to another node
            sys.exit(128 + signal.SIGTERM)
        if links.cause:
            raise StoppedError(
                "the preflight has failed", wanted="all ranks fit", found=links.cause, code=links.cause.code
            )
        print(f"dray: preflight took {time.monotonic() - began:.1f} s", flush=True)


def _wait(running: children.Children, deadline: float, links: control.Control) -> dict[int, int]:
    """Each rank's exit code, negative if a signal of others ended it; a rank that survives SIGKILL is left alone.

    They end by themselves at a deadline, unless they hang. After a failure the others have some seconds for that, and
    none once it is known why the run cannot start.
    """
    codes: dict[int, int] = {}
    failed = killed = False
    while running.running:
        events = running.wait(deadline - time.monotonic())
        _leave_at(events.signals, running)
        known = bool(links.cause or links.stopped) or any(map(_explains, _all_reports(links)))
        for local, code in events.ended.items():
            codes[local] = exit_codes.UNFIT if code < 0 and (killed or known) else code
        if not failed and (any(codes.values()) or _all_reports(links)):
            failed = True
            deadline = min(deadline, time.monotonic() + _OTHERS)
        if time.monotonic() > deadline or (known and not killed):
            if killed:
                return {**codes, **dict.fromkeys(running.running.values(), exit_codes.UNFIT)}
            running.tell(signal.SIGKILL)
            deadline, killed = time.monotonic() + _GRACE, True
    return codes


def _leave_at(signals: list[int], running: children.Children) -> None:
    """End at a signal: the run is stopped from outside, and that is no finding of this node's."""
    if signals:
        running.tell(signal.SIGKILL)
        sys.exit(128 + signals[0])


def _judge(plan: Mapping[str, Any], running: children.Children, links: control.Control, deadline: float) -> None:
    """As the first node: wait for the reports of all nodes; raise what is wrong, if anything is."""
    failed = False
    while not links.cause and not links.stopped:
        if not failed and _all_reports(links):
            failed, deadline = True, min(deadline, time.monotonic() + _OTHERS)
        whole = len(links.preflight) == len(plan["world"]["nodes"])
        if whole and not failed:
            return
        last = whole or time.monotonic() > deadline
        if found := finding(plan, _each_rank(plan, links), last=last):
            raise found
        _leave_at(running.wait(deadline - time.monotonic()).signals, running)


def _hear_judgement(running: children.Children, links: control.Control, deadline: float) -> None:
    """As another node on which a rank has failed: wait until the first node says what is wrong."""
    while not links.cause and not links.stopped:
        if time.monotonic() > deadline:
            raise _unknown()
        _leave_at(running.wait(deadline - time.monotonic()).signals, running)


def _all_reports(links: control.Control) -> list[dict[str, Any]]:
    """The reports of all nodes on which a rank has failed."""
    return [report for reports in links.preflight.values() for report in reports]


def _explains(report: Mapping[str, Any]) -> bool:
    """Whether the rank knows why the run cannot start: what other ranks report cannot change that."""
    return "finding" in report or "killed" in report


def _each_rank(plan: Mapping[str, Any], links: control.Control) -> dict[int, dict[str, Any]]:
    """How far each rank came, of all nodes that have reported it."""
    passed = [node for node, reports in links.preflight.items() if not reports]
    done = {rank: {"rank": rank, "phase": "done", "expired": False} for node in passed for rank in _of_node(plan, node)}
    return {**done, **{report["rank"]: report for report in _all_reports(links)}}


def _of_node(plan: Mapping[str, Any], node: int) -> range:
    each = plan["world"]["ranks_per_node"]
    return range(node * each, (node + 1) * each)


def _node(plan: Mapping[str, Any], rank: int) -> str:
    return str(plan["world"]["nodes"][rank // plan["world"]["ranks_per_node"]]["name"])


def finding(plan: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]], *, last: bool) -> DrayError | None:
    """What went wrong, by how far each rank came; None while a later report may still change it."""
    for rank in ranks.values():
        if "finding" in rank:
            return findings.error(rank["finding"])
        if "killed" in rank:
            return _of(plan, rank, f"was killed by {rank['killed']}", f"in: {rank['phase']}")
    ended = {
        number for number, rank in ranks.items() if rank["expired"] or "crashed" in rank or rank["phase"] == "done"
    }
    silent = [number for number in range(plan["world"]["size"]) if number not in ended]
    crashed = [rank for rank in ranks.values() if "crashed" in rank]
    if not last and (silent or crashed):
        return None
    expired = [rank for rank in ranks.values() if rank["expired"]]
    if expired:
        return _hung(plan, ranks, expired, silent)
    if crashed:
        first = min(crashed, key=lambda rank: (rank["order"], rank["time"]))
        return _of(plan, first, "failed", f"{first['crashed']}, in: {first['phase']}")
    return _unknown()


def _unknown() -> DrayError:
    log = run_folder.node_log("*")
    return UnfitError(
        "the preflight failed without a report", wanted="a report of each rank", found="none", fix=f"see {log}"
    )


def _hung(
    plan: Mapping[str, Any],
    ranks: Mapping[int, Mapping[str, Any]],
    expired: list[Mapping[str, Any]],
    silent: list[int],
) -> DrayError:
    """The ranks for which the others waited: those that never began, came least far, or could not report."""
    limit = max(expired, key=lambda rank: int(rank["order"]))
    waiting = {number: rank for number, rank in ranks.items() if rank["phase"] != "done"}
    furthest = max(waiting.values(), key=lambda rank: int(rank["order"]))
    never = [number for number in silent if number not in ranks]
    slowest = [number for number, rank in waiting.items() if rank["order"] < furthest["order"]]
    guilty = never or slowest or [number for number in silent if number in ranks]
    if not guilty:
        nodes = " ".join(sorted({_node(plan, number) for number in ranks}))
        return UnfitError(
            f"{furthest['phase']} did not end within {limit['limit']} s on any rank",
            wanted=_LIMITS,
            found=f"all ranks hang in it, on {nodes}",
            fix=f"{_STOOD}, for where each rank stood and what NCCL reported",
        )
    known = ranks.get(guilty[0], {"phase": "its start"})
    return UnfitError(
        ", ".join(f"rank {number} on {_node(plan, number)}" for number in guilty[:4])
        + (f" and {len(guilty) - 4} more" if guilty[4:] else "")
        + f" did not answer in {limit['limit']} s",
        wanted=_LIMITS,
        found=f"stopped in: {known['phase']}; the others waited in: {furthest['phase']}",
        fix=f"leave that node out (sbatch --exclude); {_STOOD}, for where each rank stood",
        node=_node(plan, guilty[0]),
        rank=guilty[0],
    )


def _of(plan: Mapping[str, Any], report: Mapping[str, Any], what: str, found: str) -> DrayError:
    rank = report["rank"]
    name, log = _node(plan, rank), run_folder.node_log(rank // plan["world"]["ranks_per_node"])
    wanted = "a rank that passes the preflight"
    return UnfitError(
        f"rank {rank} on {name} {what}", wanted=wanted, found=found, fix=f"see {log}", node=name, rank=rank
    )
