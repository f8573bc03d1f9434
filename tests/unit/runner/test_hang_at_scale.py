"""A hang of hundreds of nodes: what they send to the first one, and what is kept of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dray.runner import connections, hang
from dray.runner.connections import Entered, Hung, Message, Seen
from dray.runner.heartbeats import Late
from nodes import decoded, loopback, planned

EACH = 8
GATHER = (
    "all_gather (torch/distributed/distributed_c10d.py:2500)",
    *(f"main (/y/train.py:{n})" for n in range(40, 50)),
)
READ = ("read (/y/data.py:3)", *GATHER[1:])
ENTERED = Entered("0", 9, "all_gather", waits=True)
WAITS = Seen(0, state="sleeps", step=5, phase="step", frames=GATHER, flight=(ENTERED,))
READS = WAITS._replace(frames=READ, state="runs", flight=(Entered("0", 8, "barrier"),))


def does(rank: int, odd_rank: int) -> Seen:
    return (READS if rank == odd_rank else WAITS)._replace(rank=rank, node=f"n{rank // EACH + 1}")


class Cluster:
    """The first node's own code, and that of all others, without the connections between them."""

    def __init__(self, folder: Path, nodes: int, odd_rank: int) -> None:
        (folder / "failures").mkdir()
        names = [f"n{number + 1}" for number in range(nodes)]
        plan = decoded(planned(folder, nodes=loopback(*names), ranks_per_node=EACH))
        told: list[Message] = []
        self.first = hang.Hang(plan, 0, lambda _: 0, told.append)
        self.messages = self.bytes = 0
        self.first.hear(Late(odd_rank, True, 700.0, 600.0))
        assert [type(message) for message in told] == [Hung]
        for node in range(1, nodes):
            ranks = range(node * EACH, (node + 1) * EACH)
            for rank in ranks:
                self.send(does(rank, odd_rank))
        while not self.first.named:
            self.first.look()
            time.sleep(0.01)

    def send(self, message: Message) -> None:
        line = connections.encode(message)
        self.bytes, self.messages = self.bytes + len(line), self.messages + 1
        self.first.hear(connections.decode(line))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node's own ranks wait, too."""

    def save(seen: list[Seen], rank: int, *_: object) -> None:
        seen[rank] = does(rank, -1)

    monkeypatch.setattr(hang, "save_stacks", save)
    monkeypatch.setattr(hang, "_EVIDENCE_S", 120.0)


@pytest.mark.usefixtures("seen")
def test_the_odd_rank_is_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 400, odd_rank=1337)
    why = cluster.first.named
    assert why is not None
    assert (why.rank, why.node) == (1337, "n168")
    assert why.problem == (
        "hang: rank 1337 on n168 has last entered barrier, collective 8 of group 0, and others all_gather, collective "
        "9: at step 5, in read (/y/data.py:3), called by main (/y/train.py:40), called by main (/y/train.py:41); "
        "waiting in all_gather: 3199 ranks; rank 1337 on n168 has made no progress for 700 s (limit 600 s)"
    )
    assert cluster.messages == 399 * EACH
    assert cluster.bytes / cluster.messages < 700
    assert json.loads((tmp_path / "failures" / "hang.json").read_text())["last_lines"] == [*READ]


def test_the_time_to_find_the_odd_rank_grows_with_the_ranks_and_not_faster() -> None:
    """Half of them wait elsewhere, in groups of eight, as with shards of a node."""

    def took(ranks: int) -> float:
        def one(rank: int) -> Seen:
            flight = (ENTERED._replace(group=str(rank // 8)),)
            return (WAITS if rank % 2 else READS)._replace(rank=rank, flight=flight)

        seen = [one(rank) for rank in range(ranks)]
        began = time.process_time()
        hang.find_culprit(seen)
        return time.process_time() - began

    assert took(16_000) < 40 * min(took(2_000) for _ in range(3)) + 0.05
