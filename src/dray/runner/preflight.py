"""The preflight: after the node check and before the launch, all ranks prove in time that they can communicate.

Each rank leaves its progress in a file of its own node. A node reports its ranks to the first node when one of them has
failed, when all have passed, and when it is asked. The first node judges by the reports of all nodes, and tells all.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dray.contract import run_folder
from dray.contract.findings import DrayError, Finding, UnfitError, error, listed
from dray.runner import children, control
from dray.runner.rendezvous import StoppedError

_GRACE = 15.0  # seconds beyond the deadlines in which ranks that still can have ended by themselves, and for an answer
_LIMITS = "all ranks join within rendezvous_timeout_s, and end the collectives within preflight.timeout_s"
_LOOK_S = 0.5  # from one look of the first node at all reports to the next: thousands may come at once
_OTHERS = 5.0  # seconds after the first failure in which other ranks may fail too, or say why
_STOOD = "see preflight/rank-*.stack and nccl-*.log in the run folder"


def check(
    plan: Mapping[str, Any], me: int, ranks: children.Children, environ: Mapping[str, str], links: control.Control
) -> None:
    """Return if all ranks can communicate, else raise why."""
    began = time.monotonic()
    try:
        for folder in (plan["scratch"], plan["folder"]):
            os.makedirs(f"{folder}/{run_folder.PREFLIGHT}", exist_ok=True)
        _start(plan, me, ranks, environ)
        _wait(plan, me, ranks, links, began + _limit(plan) + _GRACE)
    except OSError as wrong:
        raise UnfitError(
            "the preflight cannot start",
            wanted=f"{plan['folder']}, {plan['scratch']} and /tmp are writable on this node",
            found=wrong,
            fix="free space on that disk, and check your quota",
        ) from wrong
    finally:
        ranks.tell(signal.SIGKILL)
    if links.stopped:  # by a signal to another node
        sys.exit(128 + signal.SIGTERM)
    if links.cause:
        wanted = "no failure on any node"
        raise StoppedError(
            "the run ends before this node's launch", wanted=wanted, found=links.cause, code=links.cause.code
        )
    print(f"dray: preflight took {time.monotonic() - began:.1f} s", flush=True)


def _start(plan: Mapping[str, Any], me: int, ranks: children.Children, environ: Mapping[str, str]) -> None:
    """Start this node's ranks: not by ranks.py, which ends all after the first, so that none could report any more."""
    folder, each, size = plan["folder"], plan["world"]["ranks_per_node"], plan["world"]["size"]
    argv = [sys.executable, "-m", "dray.checks.preflight", f"{folder}/{run_folder.PLAN}"]
    log = os.open(f"{folder}/{run_folder.preflight_log(me)}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for local, rank in enumerate(_of_node(plan, me)):
        number = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each), "WORLD_SIZE": str(size)}
        ranks.start(argv, label=rank, env={**environ, **number}, on_parent_death=signal.SIGKILL, output=log)
    os.close(log)


def _wait(plan: Mapping[str, Any], me: int, ranks: children.Children, links: control.Control, deadline: float) -> None:
    """Wait until this node's ranks, and on the first node all, have passed, or the run ends; raise what is wrong."""
    codes: dict[int, int] = {}
    reports: dict[int, dict[str, Any]] = {}
    """Of the ranks that have ended."""
    own, judge = _of_node(plan, me), Judge(plan, links, deadline)
    while True:
        events = ranks.wait(_LOOK_S)
        if events.signals:  # the run is stopped from outside, and that is no finding of this node's
            sys.exit(128 + events.signals[0])
        if links.cause or links.stopped:  # ranks that have ended since then were killed for it
            return
        codes |= events.ended
        reports |= {rank: _report(plan, rank, code) for rank, code in events.ended.items()}
        passed = len(codes) == len(own) and not any(codes.values())
        if links.report_wanted or (events.ended and (passed or any(codes.values()))):
            links.report_preflight([] if passed else [reports.get(rank) or _report(plan, rank) for rank in own])
        if passed if me else judge.passed():
            return
        if me and time.monotonic() > deadline + 3 * _GRACE:
            name = plan["world"]["nodes"][0]["name"]
            raise UnfitError(
                f"the first node ({name}) does not answer",
                wanted="its judgement of the preflight",
                found=f"nothing for {3 * _GRACE:.0f} s after the deadline",
                fix=f"leave that node out (sbatch --exclude); see {run_folder.node_log(0)}",
                node=name,
            )


def _report(plan: Mapping[str, Any], rank: int, code: int | None = None) -> dict[str, Any]:
    """How far a rank of this node has come, and how it ended if it has."""
    report: dict[str, Any] = {"phase": "its start", "order": -1, "limit": 0, "time": 0.0, "ends": math.inf}
    path = f"{plan['scratch']}/{run_folder.PREFLIGHT}/rank-{rank}.json"
    with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        report = json.load(file)
    late = time.monotonic() > report.pop("ends")
    explained = "finding" in report or "crashed" in report
    report |= {"rank": rank, "stuck": late and code is None, "expired": late and bool(code) and not explained}
    if code and code < 0:
        report["killed"] = signal.Signals(-code).name
    elif code and not explained and not late:
        report["crashed"] = f"exit code {code}"
    return report


class Judge:
    """The first node's judgement by the reports of all nodes."""

    def __init__(self, plan: Mapping[str, Any], links: control.Control, deadline: float) -> None:
        self._plan, self._links, self._deadline = plan, links, deadline
        self._failed = self._asked = False
        self._before: dict[int, list[dict[str, Any]]] = {}
        """The reports from before all were asked."""
        self._looks_at = 0.0

    def passed(self) -> bool:
        """Whether all ranks of all nodes have passed. DrayError: why they have not."""
        now, new = time.monotonic(), self._links.preflight
        whole = len(new) == len(self._plan["world"]["nodes"])
        if whole and not any(new.values()):
            return True
        if now < self._looks_at:
            return False
        self._looks_at = now + _LOOK_S
        reports = {**self._before, **new}
        if not self._failed and any(reports.values()):
            self._failed, self._deadline = True, min(self._deadline, now + _OTHERS)
        over = now > self._deadline
        if self._failed or over:
            ranks = _each_rank(self._plan, reports)
            if found := finding(self._plan, ranks, last=self._asked and (whole or over)):
                raise found
        if over:  # ranks that began later may be in order: all nodes say how far theirs have come by now
            self._asked, self._deadline, self._before = True, now + _GRACE, reports
            self._links.ask_preflight()
        return False


def _each_rank(plan: Mapping[str, Any], reports: Mapping[int, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """How far each rank has come, of all nodes that have reported it."""
    done = {"phase": "done", "expired": False}
    ranks = {rank: {"rank": rank, **done} for node in reports if not reports[node] for rank in _of_node(plan, node)}
    return {**ranks, **{report["rank"]: report for node in reports.values() for report in node}}


def _of_node(plan: Mapping[str, Any], node: int) -> range:
    each = plan["world"]["ranks_per_node"]
    return range(node * each, (node + 1) * each)


def _node(plan: Mapping[str, Any], rank: int) -> str:
    return str(plan["world"]["nodes"][rank // plan["world"]["ranks_per_node"]]["name"])


def _limit(plan: Mapping[str, Any]) -> int:
    """Seconds that all ranks have together for the rendezvous and the collectives."""
    return int(plan["world"]["rendezvous_timeout_s"] + plan["preflight"]["timeout_s"])


def _all_nodes(plan: Mapping[str, Any]) -> str:
    """The node of a finding which does not say whose fault it is: else the first node would name itself."""
    return listed(node["name"] for node in plan["world"]["nodes"])


def finding(plan: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]], *, last: bool) -> DrayError | None:
    """What went wrong, by how far each rank came; None while a later report may still change it."""
    for rank in ranks.values():
        if "finding" in rank:
            found = Finding(**rank["finding"])
            return error(found._replace(node=found.node or _all_nodes(plan)))
        if "killed" in rank:
            return _of(plan, rank, f"was killed by {rank['killed']}", f"in: {rank['phase']}")
    ended = {
        number for number, rank in ranks.items() if rank["expired"] or "crashed" in rank or rank["phase"] == "done"
    }
    silent = [number for number in range(plan["world"]["size"]) if number not in ended]
    crashed = [rank for rank in ranks.values() if "crashed" in rank]
    if not last and (silent or crashed):
        return None
    if crashed and not any(rank["expired"] for rank in ranks.values()):
        first = min(crashed, key=lambda rank: (rank["order"], rank["time"]))
        return _of(plan, first, "failed", f"{first['crashed']}, in: {first['phase']}")
    return _hung(plan, ranks)


def _hung(plan: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> DrayError:
    """The ranks for which the others waited: those whose runner is silent, that came least far, or cannot end."""
    waiting = {number: rank for number, rank in ranks.items() if rank["phase"] != "done"}
    furthest: Mapping[str, Any] = max(
        waiting.values(), key=lambda rank: int(rank["order"]), default={"phase": "done", "order": 0}
    )
    least = min((int(rank["order"]) for rank in waiting.values()), default=0)
    expired = [rank for rank in waiting.values() if rank["expired"]]
    limit = max(expired, key=lambda rank: int(rank["order"]))["limit"] if expired else _limit(plan)
    silent = [number for number in range(plan["world"]["size"]) if number not in ranks]
    slowest = [number for number, rank in waiting.items() if rank["order"] == least < furthest["order"]]
    stuck = [number for number, rank in waiting.items() if rank.get("stuck")]
    guilty = silent or slowest or (stuck if len(stuck) < len(waiting) else [])
    if not guilty:
        nodes = " ".join(sorted({_node(plan, number) for number in ranks}))
        return UnfitError(
            f"{furthest['phase']} did not end within {limit} s on any rank",
            wanted=_LIMITS,
            found=f"all ranks hang in it, on {nodes}",
            fix=f"{_STOOD}, for where each rank stood and what NCCL reported",
            node=_all_nodes(plan),
        )
    where = "its node's runner does not answer" if silent else f"stopped in: {ranks[guilty[0]]['phase']}"
    others = f"the others waited in: {furthest['phase']}" if waiting else "the others have passed"
    return UnfitError(
        ", ".join(f"rank {number} on {_node(plan, number)}" for number in guilty[:4])
        + (f" and {len(guilty) - 4} more" if guilty[4:] else "")
        + f" did not answer in {limit} s",
        wanted=_LIMITS,
        found=f"{where}; {others}",
        fix=f"leave that node out (sbatch --exclude); {_STOOD}, for where each rank stood",
        node=_node(plan, guilty[0]),
        rank=guilty[0],
    )


def _of(plan: Mapping[str, Any], report: Mapping[str, Any], what: str, found: str) -> DrayError:
    rank = report["rank"]
    name, log = _node(plan, rank), run_folder.preflight_log(rank // plan["world"]["ranks_per_node"])
    wanted = "a rank that passes the preflight"
    return UnfitError(
        f"rank {rank} on {name} {what}", wanted=wanted, found=found, fix=f"see {log}", node=name, rank=rank
    )
