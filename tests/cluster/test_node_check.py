"""A node that its own check finds unfit before the rendezvous: a spare node takes its place in the same job."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.cluster

ROOM = ("preflight.when=always", "preflight.shared_memory_gb=0.2")


@pytest.fixture
def small(cluster) -> Iterator[None]:
    """/dev/shm of n1 with 64 MB, as Docker makes it by default."""

    def resize(size: str) -> None:
        ended = cluster.exec(["mount", "-o", f"remount,size={size}", "/dev/shm"], user="root", node="n1")
        assert ended.code == 0, ended.err

    resize("64m")
    yield
    resize("1g")


@pytest.mark.slow
def test_a_spare_node_takes_its_place(sbatch, small: None, short) -> None:
    ended = sbatch(
        "--nodes=2", "slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, "nodes=1", "spares=1", *ROOM,
        "ranks_per_node=1",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    first, second = (json.loads((ended.folder / f"attempt-{n}/result.json").read_text()) for n in (1, 2))
    assert (first["exit_code"], first["failing_nodes"], first["hosts"]) == (69, ["n1"], ["n1"])
    assert (ended.folder / "attempt-1/failing_nodes.txt").read_text() == "n1\n"
    assert first["cause"]["why"].splitlines()[0] == "/dev/shm is too small"
    assert (second["status"], second["hosts"]) == ("done", ["n2"])
    assert "spare nodes take over: n2, without n1\n" in ended.output


def test_the_other_node_hears_of_it_at_once(sbatch, small: None, short) -> None:
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, *ROOM)
    assert ended.code == 69, ended.output
    assert "failing nodes: n1 (sbatch --exclude=" in ended.output
    logs = {number: (ended.attempt / f"logs/node-{number}.log").read_text() for number in (0, 1)}
    assert "1 of 2 nodes are unfit: n1" in logs[1]
    assert [path.name for path in (ended.attempt / "failures").iterdir()] == ["node-0.json"]
