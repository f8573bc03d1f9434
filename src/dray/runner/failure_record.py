"""Records why this node or a rank of it failed, and what the node is, as files that outlive it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dray.contract import failures, files, hardware, processes, run_folder
from dray.contract.findings import Finding
from dray.runner import evidence, heartbeats, redact
from dray.runner.log import say
from dray.runner.plan import Environ, Plan

_WAIT_S = 5.0  # at most, for all ranks: a program ends with its supervisor, which records how it ended


def write(folder: str, name: str, found: Finding, log: str, **more: object) -> None:
    """Write failures/NAME.json; a full disk must not hide the exit code as well."""
    fields = {
        "time": time.time(), "node": found.node, "rank": found.rank, "code": found.code, "why": str(found), "log": log,
        "last_lines": files.tail(log), **more,
    }  # fmt: skip
    if "lost" not in more:  # this node tells nothing of another that is gone
        fields["evidence"] = evidence.collect(folder, log)
    put(f"{folder}/{run_folder.failure(name)}", json.dumps(redact.redacted(fields), indent=1))


def first_failure(plan: Plan) -> dict[str, Any] | None:
    """The record of the first failure of this node's ranks, because of which the others failed; None if none has.

    The launcher has ended, and a rank ends with it. One whose supervisor was killed is recorded now.
    """
    records = []
    seen = time.time()
    deadline = time.monotonic() + _WAIT_S
    for rank in plan.ranks:
        path = f"{plan.folder}/{run_folder.failure(f'rank-{rank}')}"
        while (program := _unrecorded(plan, rank, path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if program and not processes.began(program):
            found = Finding("killed by SIGKILL, or its supervisor was", code=137, node=plan.name, rank=rank)
            write(plan.folder, f"rank-{rank}", found, f"{plan.folder}/{run_folder.rank_log(rank)}", time=seen)
        with suppress(OSError, ValueError):  # there is none, or a full disk has cut it short
            records.append(json.loads(files.read(path)))
    first = min((record["time"] for record in records), default=0.0)

    def order(record: Mapping[str, Any]) -> float:
        lines = [record["why"], *record["last_lines"]]
        return failures.cause_order(record["time"], first, lambda: failures.follows_peer(lines))

    return min(records, key=order, default=None)


def _unrecorded(plan: Plan, rank: int, path: str) -> int:
    """The rank's program, if neither its exit code nor a record was written; else 0."""
    return 0 if os.path.exists(path) else max(0, heartbeats.of(plan, rank).program)


def this_node(plan: Plan, environ: Environ) -> None:
    """Write nodes/node-N.json, the node's hardware and software, for the capsule."""
    # cuda12 has cuda's GPUs, rocm6 those of rocm.
    seen = hardware.look(plan.variant.rstrip("0123456789"), environ, packages=plan.me == 0)
    node = {"node": plan.me, "name": plan.name, **seen}
    put(f"{plan.folder}/{run_folder.node(plan.me)}", json.dumps(node, indent=1))


def set_aside(plan: Plan, restart: int) -> None:
    """Move this node's records to failures/restart-N: they are the reason for a restart, and did not end the run."""
    target = f"{plan.folder}/{run_folder.restart(restart)}"
    for name in ("hang", f"node-{plan.me}", *(f"rank-{rank}" for rank in plan.ranks)):
        with suppress(OSError):  # there is none, or another node was first
            os.makedirs(target, exist_ok=True)
            os.replace(f"{plan.folder}/{run_folder.failure(name)}", f"{target}/{name}.json")


def put(target: str, text: str) -> None:
    """Write a file of the run folder, or print why it cannot be written: no run fails for that."""
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        files.write_atomic(target, text)
    except OSError as error:
        say(f"{target} cannot be written: {error}")
