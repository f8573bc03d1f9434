"""The preflight: after the node check and before the launch, all ranks prove in time that they can communicate.

Each rank leaves its progress in a file of its own node. Once they have ended, each node sends their last reports to the
first node, which judges by those of all nodes, and tells all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dray.contract import exit_codes, run_folder
from dray.contract.findings import DrayError, UnfitError, error
from dray.runner import children, control
from dray.runner.hello import StoppedError

_GRACE = 15.0  # seconds beyond the deadlines in which ranks that still can have ended by themselves
_LIMITS = "all ranks join within rendezvous_timeout_s, and end the collectives within preflight.timeout_s"
_OTHERS = 5.0  # seconds after the first failure in which the reports of all other ranks reach the first node
_STOOD = "see preflight/rank-*.stack and nccl-*.log in the run folder"


def check(
    plan: Mapping[str, Any], me: int, ranks: children.Children, environ: Mapping[str, str], links: control.Control
) -> None:
    """Return if all ranks can communicate, else raise why."""
    began, world = time.monotonic(), plan["world"]
    deadline = began + world["rendezvous_timeout_s"] + plan["preflight"]["timeout_s"] + _GRACE
    try:
        for folder in (plan["scratch"], plan["folder"]):
            os.makedirs(f"{folder}/{run_folder.PREFLIGHT}", exist_ok=True)
        _start(plan, me, ranks, environ)
        codes = _wait(ranks, deadline, links)
        reports = _reports(plan, me, codes) if any(codes.values()) else []
    except OSError as wrong:
        raise UnfitError(
            "the preflight cannot start",
            wanted=f"{plan['folder']}, {plan['scratch']} and /tmp are writable on this node",
            found=wrong,
            fix="free space on that disk, and check your quota",
        ) from wrong
    links.report_preflight(reports)
    if not me:
        _judge(plan, ranks, links, deadline + _GRACE)
    elif reports:
        _hear_judgement(ranks, links, deadline + 3 * _GRACE)
    if links.stopped:  # by a signal to another node
        sys.exit(128 + signal.SIGTERM)
    if links.cause:
        raise StoppedError("the preflight has failed", wanted="all ranks fit", found=links.cause, code=links.cause.code)
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


def _wait(ranks: children.Children, deadline: float, links: control.Control) -> dict[int, int]:
    """Each rank's exit code, negative if a signal of others ended it; a rank that survives SIGKILL is left alone.

    They end by themselves at a deadline, unless they hang. After a failure the others have some seconds for that, and
    none once it is known why the run cannot start.
    """
    codes: dict[int, int] = {}
    failed = killed = False
    while ranks.running:
        events = ranks.wait(deadline - time.monotonic())
        _leave_at(events.signals, ranks)
        known = bool(links.cause or links.stopped) or any(map(_explains, _all_reports(links)))
        for rank, code in events.ended.items():
            codes[rank] = exit_codes.UNFIT if code < 0 and (killed or known) else code
        if not failed and (any(codes.values()) or _all_reports(links)):
            failed = True
            deadline = min(deadline, time.monotonic() + _OTHERS)
        if time.monotonic() > deadline or (known and not killed):
            if killed:
                return {**codes, **dict.fromkeys(ranks.running.values(), exit_codes.UNFIT)}
            ranks.tell(signal.SIGKILL)
            deadline, killed = time.monotonic() + _GRACE, True
    return codes


def _leave_at(signals: list[int], ranks: children.Children) -> None:
    """End at a signal: the run is stopped from outside, and that is no finding of this node's."""
    if signals:
        ranks.tell(signal.SIGKILL)
        sys.exit(128 + signals[0])


def _reports(plan: Mapping[str, Any], me: int, codes: Mapping[int, int]) -> list[dict[str, Any]]:
    """How far each rank of this node came, and which signal ended it."""
    found = []
    for rank in _of_node(plan, me):
        report: dict[str, Any] = {"rank": rank, "phase": "its start", "order": -1, "limit": 0, "time": 0.0}
        with (
            suppress(FileNotFoundError),
            open(f"{plan['scratch']}/{run_folder.PREFLIGHT}/rank-{rank}.json", encoding="utf-8") as file,
        ):
            report = json.load(file)
        stack = f"{plan['folder']}/{run_folder.PREFLIGHT}/rank-{rank}.stack"
        report["expired"] = os.path.exists(stack) and os.path.getsize(stack) > 0
        if codes[rank] < 0:
            report["killed"] = signal.Signals(-codes[rank]).name
        found.append(report)
    return found


def _judge(plan: Mapping[str, Any], ranks: children.Children, links: control.Control, deadline: float) -> None:
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
        _leave_at(ranks.wait(deadline - time.monotonic()).signals, ranks)


def _hear_judgement(ranks: children.Children, links: control.Control, deadline: float) -> None:
    """As another node on which a rank has failed: wait until the first node says what is wrong."""
    while not links.cause and not links.stopped:
        if time.monotonic() > deadline:
            raise _unknown()
        _leave_at(ranks.wait(deadline - time.monotonic()).signals, ranks)


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
            return error(rank["finding"])
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
    log = run_folder.preflight_log("*")
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
    name, log = _node(plan, rank), run_folder.preflight_log(rank // plan["world"]["ranks_per_node"])
    wanted = "a rank that passes the preflight"
    return UnfitError(
        f"rank {rank} on {name} {what}", wanted=wanted, found=found, fix=f"see {log}", node=name, rank=rank
    )
