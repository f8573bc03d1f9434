"""Records failed ranks whose supervisor was killed before it could record them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from dray.contract import files, processes, run_folder
from dray.runner import heartbeats, record

_KILLED = 137
_WAIT_S = 5.0  # at most: a program ends with its supervisor, or its supervisor writes down how it ended


def record_ranks(plan: Mapping[str, Any], me: int) -> None:
    """Record such ranks of this node, once the launcher has ended or fails: a rank ends with its supervisor."""
    each, name = plan["world"]["ranks_per_node"], plan["world"]["nodes"][me]["name"]
    seen, deadline = time.time(), time.monotonic() + _WAIT_S
    for rank in range(me * each, (me + 1) * each):
        while (died := _died_unrecorded(plan, rank)) is not False and time.monotonic() < deadline:
            time.sleep(0.02)
        if died:
            log = f"{plan['folder']}/{run_folder.rank_log(rank)}"
            why = "killed by SIGKILL, or its supervisor was"
            record.write(
                plan["folder"], f"rank-{rank}", node=name, rank=rank, code=_KILLED, why=why, log=log,
                last_lines=files.tail(log), time=seen,
            )  # fmt: skip


def _died_unrecorded(plan: Mapping[str, Any], rank: int) -> bool | None:
    """Whether the rank's program is gone without a written exit code or record; None while it runs."""
    if os.path.exists(f"{plan['folder']}/{run_folder.failure(f'rank-{rank}')}"):
        return False
    program = heartbeats.program(plan["scratch"], rank)
    if program <= 0:
        return False
    return None if processes.began(program) else True
