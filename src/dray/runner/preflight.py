"""The preflight: each node checks itself before the rendezvous; after it, all ranks prove that they can communicate.

One process for each rank, dray.checks.rank, does both: the import of torch is most of what it costs. It tells its
progress and its findings by lines of JSON. A driver call that never returns must not hold up the runner: a check that
hangs is killed, and the node is unfit.

After the rendezvous a node reports its ranks to the first node when one of them has failed or hangs, and when all have
passed. The first node judges by the reports of all nodes, and tells all.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dray.contract import exit_codes, node_start, run_folder
from dray.contract.findings import DrayError, Finding, UnfitError, error, listed
from dray.runner import say
from dray.runner.children import Children, ended_with
from dray.runner.connections import Report
from dray.runner.control import Control
from dray.runner.plan import Environ, Plan

LOADING = "import torch"  # no fault of a GPU: the image is read from a busy disk
_GRACE = 15.0  # seconds beyond the deadlines in which ranks that still can have ended by themselves, and for an answer
_LATE = 2.0  # from its deadline to the end of a rank that can end by itself
_LOOK_S, _ALONE_LOOK_S = 0.5, 0.01
_OTHERS = 5.0  # seconds after the first failure in which other ranks may fail too, or say why
_LIMITS = "all ranks join within rendezvous_timeout_s, and end the collectives within preflight.timeout_s"
_STOOD = (
    "leave a node that is named out (sbatch --exclude); where each rank stood and what NCCL reported: "
    "preflight/rank-*.stack and nccl-*.log in the run folder"
)


class RankCheck:
    """The check process of a rank, and its report."""

    def __init__(self, rank: int, node: str, log: str, argv: list[str], env: Environ) -> None:
        self.report = Report(rank, node, log, part=f"rank {rank}")
        self.waits = False
        """Whether it waits for the other nodes, or has ended."""
        self._since, self._ends = time.monotonic(), math.inf
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, env=env, start_new_session=True)  # noqa: S603
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)

    def hear(self) -> None:
        """Take the lines that have come, each by one write."""
        assert self.process.stdout
        for line in (self.process.stdout.read() or b"").decode(errors="replace").splitlines():
            try:
                self._take(**json.loads(line))
            except (ValueError, TypeError):  # what the image's Python prints as it starts
                say(f"{self.report.part}: {line}")

    def _take(self, finding: dict[str, Any] | None = None, **fields: Any) -> None:  # noqa: ANN401  any JSON value
        if finding:
            found = Finding(**finding)
            self._note(found if self.waits else found._replace(node=self.report.node))  # later it may be another's
            return
        self.report = self.report._replace(**fields)
        self._since = time.monotonic()
        if "limit" in fields:
            self._ends = self._since + self.report.limit
        self.waits = self.waits or self.report.ready

    def _note(self, finding: Finding) -> None:
        say(f"{finding.level}: {finding}")
        if finding.code:
            self.report = self.report._replace(findings=(*self.report.findings, finding))

    def _unfit(self, problem: str) -> None:
        self._note(
            Finding(
                f"{self.report.part}: {problem}",
                wanted="a check that ends in time",
                found=f"in: {self.report.phase}: {self.report.why}".removesuffix(": "),
                fix="leave this node out (sbatch --exclude), and tell the administrators",
                code=exit_codes.UNFIT,
            )
        )

    def look(self) -> None:
        """Hear it before the rendezvous, and note if it has ended."""
        self.hear()
        code = None if self.waits else self.process.poll()  # the runner's Children reap what waits
        if code is not None:
            self.hear()
            self.waits = True
            if not self.report.findings:
                self._unfit(f"the check ended: {ended_with(code)}")

    def late(self, seconds: float) -> None:
        """Note that it does not wait for the others after these seconds; it may go on if its last phase began late."""
        part, phase = self.report.part, self.report.phase
        if phase != LOADING and time.monotonic() - self._since >= seconds / 2:
            self._unfit(f"no answer within {seconds:.0f} s")
        else:
            self._note(Finding(f"{part} is not checked: {phase} was not done within {seconds:.0f} s"))

    def go(self, environ: Environ, limit: int) -> None:
        """Have it go on with these variables, within these seconds at first."""
        assert self.process.stdin
        self._take(limit=limit)
        with suppress(BrokenPipeError):  # it has ended, which is seen next
            self.process.stdin.write(json.dumps(dict(environ.items() - os.environ.items())).encode() + b"\n")

    def end(self, code: int | None) -> str:
        """How it ended, if it has, with this exit code; empty while it has time."""
        self.hear()
        end, why = self.report.end, self.report.why
        late = time.monotonic() - self._ends
        if code is None:
            end = end or ("stuck" if late > _LATE else "")
        elif code == 0:
            end = "passed"
        elif code < 0:
            end, why = "killed", ended_with(code)
        elif late > -_LATE and not why:
            end = "expired"
        else:
            end, why = "crashed", why or ended_with(code)
        self.report = self.report._replace(end=end, why=why)
        return end


class Preflight:
    """The checks of this node's ranks; on the first node, the judgement by the reports of all nodes."""

    def __init__(self, plan: Plan) -> None:
        assert plan.preflight
        self._plan = plan
        self._joins_s = plan.world.rendezvous_timeout_s
        self._limit = self._joins_s + plan.preflight.timeout_s
        self._crashed_at = math.inf
        self.ranks: list[RankCheck] = []

    def start(self) -> None:
        """Start a process for each rank."""
        plan = self._plan
        # A check leaves no bytecode on a disk that may be full.
        argv = [sys.executable, "-B", "-m", "dray.checks.rank", f"{plan.folder}/{run_folder.PLAN}"]
        for local, rank in enumerate(plan.ranks):
            env = {"OMP_NUM_THREADS": "1", **os.environ, "RANK": str(rank), "LOCAL_RANK": str(local)}
            self.ranks.append(RankCheck(rank, plan.name, run_folder.node_log(plan.me), argv, env))

    def check_node(self, measured: dict[str, float]) -> Finding | None:
        """Why this node is unfit, if it is. `measured` gets the TFLOP/s of the slowest GPU.

        It takes at most half of the time for which the other nodes wait in the rendezvous.
        """
        limit = self._joins_s / 2
        deadline, busy = time.monotonic() + limit, self.ranks
        while busy and time.monotonic() < deadline:
            time.sleep(_ALONE_LOOK_S)
            for rank in busy:
                rank.look()
            busy = [rank for rank in busy if not rank.waits]
        for rank in busy:
            rank.late(limit)
        reports = [rank.report for rank in self.ranks]
        if speeds := [report.tflops for report in reports if report.tflops]:
            measured[node_start.TFLOPS] = min(speeds)
        findings = [finding for report in reports for finding in report.findings]
        if not findings:
            return None
        for rank in self.ranks:  # each with what it has started, such as nvidia-smi
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        problem = "; ".join(finding.problem for finding in findings)
        return findings[0]._replace(problem=problem, node=self._plan.name)

    def check_together(self, children: Children, environ: Environ, links: Control) -> None:
        """Return if all ranks can communicate, or if the run ends; else raise why they cannot."""
        os.makedirs(f"{self._plan.folder}/{run_folder.PREFLIGHT}", exist_ok=True)
        for rank in self.ranks:
            children.running[rank.process.pid] = rank.report.rank
            rank.go(environ, self._joins_s)
        try:
            self._wait(children, links)
        finally:
            children.tell(signal.SIGKILL)

    def _wait(self, children: Children, links: Control) -> None:
        """Wait until this node's ranks, and on the first node all, have passed, or the run ends; else raise why."""
        deadline = time.monotonic() + self._limit + _GRACE
        before: list[str] = []
        while True:
            signals, ended = children.wait(_LOOK_S)
            if signals:  # the run is stopped from outside, and that is no finding of this node's
                links.heard(signal.SIGTERM)
            if links.cause or links.stopped:  # ranks that have ended since then were killed for it
                links.can_restart = False  # a restart has no preflight, and this one has not passed
                return
            ends = [rank.end(ended.get(rank.report.rank)) for rank in self.ranks]
            passed = {*ends} == {"passed"}
            if ends != before and (passed or {*ends} - {"", "passed"}):
                links.report_preflight(() if passed else tuple(rank.report for rank in self.ranks))
            before = ends
            over = time.monotonic() - deadline
            if passed if self._plan.me else self._all_passed(links.preflight, over=over > 0):
                return
            if self._plan.me and over > 3 * _GRACE:
                first = self._plan.names[0]
                found = f"nothing for {3 * _GRACE:.0f} s after the deadline"
                raise _hung(f"the first node ({first}) does not answer", found, first)

    def _all_passed(self, reports: Mapping[int, Sequence[Report]], *, over: bool) -> bool:
        """Whether all ranks of all nodes have passed. DrayError: why they have not."""
        names = self._plan.names
        ends = {rank.end for ranks in reports.values() for rank in ranks}
        whole = len(reports) == len(names)
        if not ends and (whole or not over):
            return whole
        if "crashed" in ends and "expired" not in ends:  # others would have said by now that they know more
            self._crashed_at = min(self._crashed_at, time.monotonic())
            over = over or time.monotonic() > self._crashed_at + _OTHERS
        if found := finding(names, reports, self._limit, last=over):
            raise found
        return False


def finding(
    names: Sequence[str], reports: Mapping[int, Sequence[Report]], limit: int, *, last: bool
) -> DrayError | None:
    """What went wrong, by how far each rank came; None while a later report may still change it.

    `reports` has the nodes that have told: a report of each rank, or none where all have passed.
    """
    ranks = [rank for node in reports.values() for rank in node]
    for rank in ranks:
        if rank.findings:
            told = rank.findings[0]  # without a node: whose fault it is, nobody knows
            return error(told._replace(node=told.node or listed(names)))
        if rank.end == "killed":
            return _failed(rank, f"was {rank.why}", f"in: {rank.phase}")
    silent = [name for number, name in enumerate(names) if number not in reports]
    if not last and (silent or not all(rank.end for rank in ranks)):
        return None
    crashed = [rank for rank in ranks if rank.end == "crashed"]
    if crashed and not any(rank.end == "expired" for rank in ranks):
        first = min(crashed, key=lambda rank: (rank.order, rank.time))
        return _failed(first, "failed", f"{first.why}, in: {first.phase}")
    if silent:
        return _hung(f"the runner of {listed(silent)} does not answer", f"no report within {limit} s", silent[0])
    return _slowest(names, [rank for rank in ranks if rank.end != "passed"])


def _slowest(names: Sequence[str], waiting: Sequence[Report]) -> DrayError:
    """The ranks for which the others waited: those that came least far, or that cannot end by themselves."""
    ordered = sorted(waiting, key=lambda rank: rank.order)
    least, furthest = ordered[0], ordered[-1]
    guilty = [rank for rank in waiting if rank.order == least.order < furthest.order]
    guilty = guilty or [rank for rank in waiting if rank.end == "stuck"]
    if len(guilty) in (0, len(waiting)):
        problem = f"{furthest.phase} did not end within {furthest.limit} s on any rank"
        return _hung(problem, f"all ranks hang in it, on {' '.join(names)}", listed(names))
    first = guilty[0]
    who = listed((f"rank {rank.rank} on {rank.node}" for rank in guilty), 4)
    found = f"stopped in: {first.phase}; the others waited in: {furthest.phase}"
    return _hung(f"{who} did not answer in {furthest.limit} s", found, first.node, first.rank)


def _hung(problem: str, found: str, node: str, rank: int | None = None) -> DrayError:
    return UnfitError(problem, wanted=_LIMITS, found=found, fix=_STOOD, node=node, rank=rank)


def _failed(rank: Report, how: str, found: str) -> DrayError:
    return UnfitError(
        f"rank {rank.rank} on {rank.node} {how}",
        wanted="a rank that passes the preflight",
        found=found,
        fix=f"see {rank.log}",
        node=rank.node,
        rank=rank.rank,
    )
