"""What a run of many ranks leaves on the shared disk: named and made by dray's own code, in a temporary folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from table import Row

from dray.config import dray_home
from dray.contract import run_folder
from dray.contract.findings import Finding
from dray.facts import Facts
from dray.runner import records
from dray.runner.plan import Plan, read
from dray.runs import prepare
from dray.runs.finish import finish
from dray.runs.store import RunPaths

SIZES = (2, 64, 1024, 10_000)
EACH = 8
OF_RUN, OF_NODE = 16, 2  # files at most, beside one log for each rank
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
            most = OF_RUN + count * (OF_NODE + EACH) + fails * count * FAILING
            found.append(Row(name, count, files, "files", most))
            if not fails:
                found.append(Row("  to make them here", count, took, "s"))
    return found


@contextmanager
def _left(count: int, *, fails: bool) -> Iterator[tuple[RunPaths, float]]:
    with TemporaryDirectory(prefix="dray-files-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        recipe = prepare.read_recipe(
            dray_home.root() / "recipes" / "smoke-cpu.toml",
            [f"batch.global_size={4 * count * EACH}", f"ranks_per_node={EACH}", "preflight.when=always"],
        )
        facts = Facts(
            scheduler="slurm", job=1, nodelist=f"n[1-{count}]", nodes=count, engine="apptainer", image="/i.sif"
        )
        _, paths = prepare.write(recipe, facts, runs=Path(folder), run="many")
        plan = read(str(paths.plan))
        began = time.perf_counter()
        with mock.patch.object(records, "collect_evidence", return_value=[]):  # of the machine, and no file
            _nodes(plan, fails=fails)
        took = time.perf_counter() - began
        if not fails:
            paths.preflight.mkdir()
            paths.preflight_report.write_text(json.dumps(_REPORT))
        finish(paths, code=1 if fails else 0)
        yield paths, took


def _nodes(plan: Plan, *, fails: bool) -> None:
    """As the runners and the ranks' supervisors do."""
    for me, name in enumerate(plan.names):
        node = plan._replace(me=me)
        with Path(plan.folder, run_folder.node_log(me)).open("ab") as log:  # as srun does
            log.write(b"dray: cores of each rank: 0-3\n")
        records.write_node(node, {})
        for rank in node.ranks:
            place = Path(plan.folder, run_folder.rank_log(rank))
            place.write_bytes(b"step 1\n")
            if fails and rank - node.ranks[0] < FAILING:
                found = Finding("x", code=1, node=name, rank=rank)
                records.write_failure(plan.folder, f"rank-{rank}", found, str(place))
