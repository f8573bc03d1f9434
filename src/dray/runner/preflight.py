"""The preflight: after the node check and before the launch, all ranks prove in time that they can communicate."""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from dray.contract import exit_codes, files, rank_lines, run_folder
from dray.contract.findings import DrayError, UnfitError, error
from dray.runner import children, control, node, output
from dray.runner.introduction import StoppedError

_GRACE = 15.0  # seconds beyond the deadlines in which ranks that still can have ended by themselves
_LIMITS = "all ranks join within rendezvous_timeout_s, and end the collectives within preflight.timeout_s"
_OTHERS = 5.0  # seconds in which the word of other nodes' ranks reaches this one
_FIRST_S = 5.0  # more for the first node's judgement of all
_TOLD = ("rank", "node", "phase", "order", "limit", "time", "expired", "finding", "killed", "crashed")


def check(
    plan: Mapping[str, Any],
    me: int,
    ranks: children.Children,
    environ: Mapping[str, str],
    links: control.Control | None = None,
) -> None:
    """Return if all ranks can communicate, else raise why. In a run of many ranks nodes report over `links`."""
    began = time.monotonic()
    place = node.own(plan) or plan["folder"]
    try:
        for folder in {place, *([] if me else [plan["folder"]])}:  # the first rank leaves a report in the run's
            os.makedirs(f"{folder}/{run_folder.PREFLIGHT}", exist_ok=True)
        codes = _ranks(plan, me, ranks, environ, links)
        if links and links.stopped:  # by a signal to another node
            sys.exit(128 + signal.SIGTERM)
        for rank, code in codes.items():
            if code < 0 and not (links and node.own(plan) and links.cause):
                _note(place, plan, rank, signal.Signals(-code).name)
    except OSError as wrong:
        raise UnfitError(
            "the preflight cannot start",
            wanted=f"{place} and /tmp are writable on this node",
            found=wrong,
            fix="free space on that disk, and check your quota",
        ) from wrong
    if links and node.own(plan):
        _settle(plan, me, ranks, codes, links)
    elif any(codes.values()):
        raise _blame(plan, me)
    print(f"dray: preflight took {time.monotonic() - began:.1f} s", flush=True)


def _ranks(
    plan: Mapping[str, Any],
    me: int,
    ranks: children.Children,
    environ: Mapping[str, str],
    links: control.Control | None,
) -> dict[int, int]:
    """Run this node's ranks and return their exit codes; they end by themselves at a deadline, unless they hang.

    Not by ranks.py, which ends all ranks after the first: then a rank could not report where it stood.
    """
    world, folder, own = plan["world"], plan["folder"], node.own(plan)
    each = world["ranks_per_node"]
    argv = [sys.executable, "-m", "dray.checks.preflight", f"{folder}/{run_folder.PLAN}"]
    filters = []
    for local in range(each):
        rank = me * each + local
        number = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each)}
        env = {**environ, **number, "WORLD_SIZE": str(world["size"])}
        if own:
            filters.append(output.Filter(output.passed(), rank_lines.prefix(rank)))
            ranks.start(argv, label=rank, env=env, on_parent_death=signal.SIGKILL, output=filters[-1].writer)
            filters[-1].watch(ranks)
        else:
            log = os.open(f"{folder}/{run_folder.preflight_log(me)}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            ranks.start(argv, label=rank, env=env, on_parent_death=signal.SIGKILL, output=log)
            os.close(log)
    limit = world["rendezvous_timeout_s"] + plan["preflight"]["timeout_s"] + _GRACE
    codes = _wait(ranks, time.monotonic() + limit, _over(links) if links and own else lambda: False)
    for one in filters:
        one.finish()
    return codes


def _over(links: control.Control) -> Callable[[], bool]:
    """Whether it is known why the run cannot start, so that this node's ranks wait in vain."""
    return lambda: bool(links.cause or (links.gathered and links.gathered.decided))


def _settle(
    plan: Mapping[str, Any], me: int, ranks: children.Children, codes: Mapping[int, int], links: control.Control
) -> None:
    """Tell the first node how far this node's ranks came; if one has failed, raise what the first node concludes."""
    each, own, failed = plan["world"]["ranks_per_node"], node.own(plan), any(codes.values())
    local = range(me * each, (me + 1) * each)
    reports = {rank: one for rank, one in told(own).items() if rank in local}
    never = {rank: {"rank": rank, "phase": "its start"} for rank in local if rank not in reports}
    links.report("preflight", [*(_short(one) for one in reports.values()), *never.values()] if failed else [])
    if not failed and not links.cause:
        return
    if not links.cause:
        _show(own, local)
    deadline = time.monotonic() + _OTHERS + (_FIRST_S if me else 0.0)
    while not links.cause:
        late = time.monotonic() > deadline
        if not me and links.gathered:
            last = late or len(links.gathered.nodes) == len(plan["world"]["nodes"])
            if found := finding(plan, links.gathered.ranks(), run_folder.node_log(me), last=last):
                raise found
        elif late:  # the first node is past it, or gone
            raise finding(plan, reports, run_folder.node_log(me), last=True) or _silent(run_folder.node_log(me))
        if signals := ranks.wait(0.05).signals:
            sys.exit(128 + signals[0])
    raise StoppedError("the preflight has failed", wanted="all ranks fit", found=links.cause, code=links.cause.code)


def _short(report: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rank's report that the first node gets."""
    return {name: report[name] for name in _TOLD if name in report}


def _show(own: str, local: range) -> None:
    """Copy each rank's stack, and the end of its NCCL log, into the node's log."""
    for rank in local:
        for name, most in ((f"rank-{rank}.stack", 200), (f"nccl-{rank}.log", 40)):
            for line in files.tail(f"{own}/{run_folder.PREFLIGHT}/{name}", most):
                print(f"{rank_lines.prefix(rank).decode()}{line}", flush=True)


def _wait(ranks: children.Children, deadline: float, over: Callable[[], bool]) -> dict[int, int]:
    """Each rank's exit code, negative for another's signal; a rank that survives SIGKILL is left alone."""
    codes: dict[int, int] = {}
    killed = False
    while ranks.running:
        events = ranks.wait(deadline - time.monotonic())
        if events.signals:  # the run is stopped from outside: that is no finding of this node's
            ranks.tell(signal.SIGKILL)
            sys.exit(128 + events.signals[0])
        for rank, code in events.ended.items():
            codes[rank] = exit_codes.UNFIT if killed and code < 0 else code
            if code and not over():  # the others come to their own deadline about now, or wait for this one in vain
                deadline = min(deadline, time.monotonic() + _OTHERS)
        if time.monotonic() > deadline or (over() and not killed):
            if killed:
                return {**codes, **dict.fromkeys(ranks.running.values(), exit_codes.UNFIT)}
            ranks.tell(signal.SIGKILL)
            deadline, killed = time.monotonic() + _GRACE, True
    return codes


def _note(folder: str, plan: Mapping[str, Any], rank: int, by: str) -> None:
    """Write for all nodes what a killed rank could not report itself."""
    report = told(folder).get(rank) or {"rank": rank, "node": _node(plan, rank), "phase": "its start", "order": -1}
    path = f"{folder}/{run_folder.PREFLIGHT}/rank-{rank}.json"
    files.write_atomic(path, json.dumps({**report, "killed": by}))


def _node(plan: Mapping[str, Any], rank: int) -> str:
    return str(plan["world"]["nodes"][rank // plan["world"]["ranks_per_node"]]["name"])


def told(folder: str) -> dict[int, dict[str, Any]]:
    """How far each rank came, by its report; ranks of machines without a shared disk are missing."""
    found = {}
    for path in glob.glob(f"{glob.escape(folder)}/{run_folder.PREFLIGHT}/rank-*.json"):
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        stack = f"{folder}/{run_folder.PREFLIGHT}/rank-{report['rank']}.stack"
        report["expired"] = os.path.exists(stack) and os.path.getsize(stack) > 0
        found[int(report["rank"])] = report
    return found


def _blame(plan: Mapping[str, Any], me: int) -> DrayError:
    """What went wrong, after a wait of up to 5 s for late reports: the rank to blame may be the last to report."""
    deadline = time.monotonic() + _OTHERS
    while True:
        last = time.monotonic() > deadline
        found = finding(plan, told(plan["folder"]), run_folder.preflight_log(me), last=last)
        if found:
            return found
        time.sleep(0.05)


def finding(
    plan: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]], log: str, *, last: bool
) -> DrayError | None:
    """What went wrong, by how far each rank came; None while a later report may still change it."""
    for rank in ranks.values():
        if "finding" in rank:
            return error(rank["finding"])
        if "killed" in rank:
            return _of(rank, f"was killed by {rank['killed']}", f"in: {rank['phase']}", f"see {log} of that node")
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
        return _of(first, "failed", f"{first['crashed']}, in: {first['phase']}", f"see {log} of that node")
    return _silent(log)


def _silent(log: str) -> DrayError:
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
    limit, furthest = (
        max(expired, key=lambda rank: int(rank["order"])),
        max(ranks.values(), key=lambda r: int(r["order"])),
    )
    never = [number for number in silent if number not in ranks and plan["world"]["shared_folder"]]
    slowest = [number for number, rank in ranks.items() if rank["order"] < furthest["order"]]
    guilty = never or slowest or [number for number in silent if number in ranks]
    if not guilty:
        nodes = " ".join(sorted({rank["node"] for rank in ranks.values()}))
        return UnfitError(
            f"{furthest['phase']} did not end within {limit['limit']} s on any rank",
            wanted=_LIMITS,
            found=f"all ranks hang in it, on {nodes}",
            fix=f"{_stood(plan)}, for where each rank stood and what NCCL reported",
        )
    known = ranks.get(guilty[0], {"rank": guilty[0], "node": _node(plan, guilty[0]), "phase": "its start"})
    return UnfitError(
        ", ".join(f"rank {number} on {_node(plan, number)}" for number in guilty[:4])
        + (f" and {len(guilty) - 4} more" if guilty[4:] else "")
        + f" did not answer in {limit['limit']} s",
        wanted=_LIMITS,
        found=f"stopped in: {known['phase']}; the others waited in: {furthest['phase']}",
        fix=f"leave that node out (sbatch --exclude); {_stood(plan)}, for where each rank stood",
        node=_node(plan, guilty[0]),
        rank=guilty[0],
    )


def _stood(plan: Mapping[str, Any]) -> str:
    if node.own(plan):
        return f"see {run_folder.node_log('*')} in the run folder"
    return "see preflight/rank-*.stack and nccl-*.log in the run folder"


def _of(rank: Mapping[str, Any], what: str, found: str, fix: str) -> DrayError:
    who = f"rank {rank['rank']} on {rank['node']}"
    wanted = "a rank that passes the preflight"
    return UnfitError(f"{who} {what}", wanted=wanted, found=found, fix=fix, node=rank["node"], rank=rank["rank"])
