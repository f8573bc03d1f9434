"""A run of many ranks on the real Slurm: a log for each node, and no file for each rank. The limit is set low."""

from __future__ import annotations

import json

import pytest

from dray.runs import logs
from dray.runs.paths import RunPaths

pytestmark = pytest.mark.cluster

FAILS = """
echo "rank $RANK begins"
[ $RANK = 3 ] || exec sleep 600
until grep -qs "rank 0 begins" "$DRAY_RUN/attempt-1/logs/node-0.log"; do sleep 0.1; done
seq 30
echo "why it fails" >&2
exit 42
"""
KEY = "runs.logs_by_node_above"
LOW = [f"{KEY}=3", "ranks_per_node=2"]


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_lines(sbatch) -> None:
    words = ["slurm/multinode.sh", "launcher=python", *LOW]
    ended = sbatch("--nodes=2", *words, "--", "sh", "-c", FAILS)
    assert ended.code == 42, ended.output
    shown = ended.output.splitlines()
    assert "rank 0 begins" in shown
    at = shown.index("failed: rank 3 on n2: exit code 42")
    assert shown[at + 1 : at + 13] == [f"  | {line}" for line in [*range(20, 31), "why it fails"]]
    paths = RunPaths(ended.folder)
    assert {path.name for path in paths.logs.iterdir()} - {"srun.log"} == {"node-0.log", "node-1.log"}
    assert [path.name for path in paths.nodes.iterdir()] == ["nodes.jsonl"]
    assert {path.name for path in paths.preflight.iterdir()} == {"report.json"}
    assert "why it fails" in json.loads(paths.result.read_text())["cause"]["last_lines"]
    one = logs.of(paths, rank=1, each=2, by_node=True)
    assert [line for _, line in logs.joined(one, paths) if b"begins" in line] == [b"rank 1 begins"]


@pytest.mark.slow
def test_it_trains_to_the_same_losses(sbatch, short: tuple[str, ...]) -> None:
    losses = []
    for limit in (3, 512):
        ended = sbatch("--nodes=2", "slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, LOW[1], f"{KEY}={limit}")
        assert ended.code == 0, ended.output
        lines = RunPaths(ended.folder).metrics.read_text().splitlines()
        losses.append([event["loss"] for event in map(json.loads, lines) if event["event"] == "step"])
    assert losses[0] == losses[1] != []
