"""Find a rank's log lines: in its own log, or, in a run of many ranks, in its node's log."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dray.contract import files, rank_lines, run_folder
from dray.runs.paths import RunPaths

_PLAN = 64 << 20


class RankLog(NamedTuple):
    """A log file, and the rank whose lines count."""

    path: Path
    rank: int | None = None
    """None: all lines."""

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines."""
        return rank_lines.tail(self.path, self.rank, lines)


def planned(paths: RunPaths, rank: int, *, by_node: bool, each: int) -> RankLog:
    """The rank's log by the plan's settings."""
    return RankLog(paths.node_log(rank // each), rank) if by_node else RankLog(paths.rank_log(rank))


def find(folder: Path, rank: int) -> RankLog:
    """The rank's log in an attempt's folder, also if the plan is damaged."""
    own = folder / run_folder.rank_log(rank)
    if os.path.lexists(own):
        return RankLog(own)
    each = None
    with suppress(Exception):  # a damaged plan hides no log
        plan = files.parse_json(files.read(folder / run_folder.PLAN, limit=_PLAN).decode(), "the plan", folder)
        world = plan["world"]
        each = int(world["ranks_per_node"]) if world.get("logs_by_node") is True else None
    return RankLog(folder / run_folder.node_log(rank // each), rank) if each and each > 0 else RankLog(own)
