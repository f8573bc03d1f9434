"""What a run of many ranks leaves on the shared disk: named and made by dray's own code, in a temporary folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from table import Row

from dray.config import checkout
from dray.contract import rank_lines, run_folder
from dray.facts import Facts
from dray.runner import evidence, node, record
from dray.runner.gathered import Gathered
from dray.runs import write
from dray.runs.finish import finish
from dray.runs.paths import RunPaths

SIZES = (2, 64, 1024, 10_000)
EACH = 8
MOST = 12_000
FAILING = 2  # ranks of each node
_MEMORY = Path("/dev/shm")  # noqa: S108  a disk takes minutes to bring all of them to it
_REPORT = {"seconds": {"bandwidth": 1.0}, "sweep": [], "ranks": [{"node": "n1", "transport": "gloo over TCP"}]}


def rows() -> list[Row]:
    """Files of a run that ended well, and of one of which ranks of all nodes failed in the same moment."""
    found = []
    for count in SIZES:
        for name, fails in (("files", False), ("files, all nodes fail", True)):
            with _left(count, fails=fails) as (paths, took):
                files = sum(len(names) for _, _, names in os.walk(paths.run))
                ranks = len([*paths.logs.glob("rank-*")])
            found.append(Row(name, count, files, "files", MOST))
            if not fails:
                found += [Row("  of single ranks", count, ranks, "files"), Row("  to make them here", count, took, "s")]
    return found


@contextmanager
def _left(count: int, *, fails: bool) -> Iterator[tuple[RunPaths, float]]:
    with TemporaryDirectory(prefix="dray-files-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        recipe = write.read_recipe(
            checkout.root() / "recipes" / "smoke-cpu.toml",
            [f"batch.global_size={4 * count * EACH}", f"ranks_per_node={EACH}", "preflight.when=always"],
        )
        facts = Facts(
            scheduler="slurm", job=1, nodelist=f"n[1-{count}]", nodes=count, engine="apptainer", image="/i.sif"
        )
        _, paths = write.write(recipe, facts, runs=Path(folder), run="many")
        plan = json.loads(paths.plan.read_text())
        began = time.perf_counter()
        with mock.patch.object(evidence, "collect", return_value=[]):  # of the machine, and no file
            _nodes(plan, folder, fails=fails)
        took = time.perf_counter() - began
        if not fails:
            paths.preflight.mkdir()
            paths.preflight_report.write_text(json.dumps(_REPORT))
        finish(paths, code=1 if fails else 0)
        yield paths, took


def _nodes(plan: dict[str, Any], folder: str, *, fails: bool) -> None:
    """As the runners and the ranks' supervisors do."""
    first, about, each = Gathered(plan), record.about(plan, 0, {}), plan["world"]["ranks_per_node"]
    if not node.own(plan):  # a small run
        first = None
    for me, one in enumerate(plan["world"]["nodes"]):
        with Path(plan["folder"], run_folder.node_log(me)).open("ab") as log:  # as srun does
            log.write(b"dray: preflight took 1.0 s\n")
        own = {**plan, "scratch": f"{folder}/own-{me}"}
        if first:
            first.hear(me, {"about": {**about, "packages": about["packages"] if me == 0 else {}}})
            first.hear(me, {"preflight": []})
        else:
            record.this_node(plan, me, {})
        for rank in range(me * each, (me + 1) * each):
            place, private = node.log_of(own, rank)
            with Path(place).open("ab") as log:
                log.write((rank_lines.prefix(rank) if private else b"") + b"step 1\n")
            if fails and rank % each < FAILING:
                record.write(
                    plan["folder"], f"rank-{rank}", own=private, node=one["name"], rank=rank, code=1, why="x",
                    log=place, last_lines=[],
                )  # fmt: skip
