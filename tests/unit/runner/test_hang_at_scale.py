"""A hang of hundreds of nodes: what they tell the first one, which asks for each stack once, and what is kept of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dray.contract import heartbeat
from dray.runner import alike, channel, hang, odd, stacks
from dray.runner.alike import Alike
from dray.runner.odd import Entered, Seen

EACH = 8
GATHER = ("/x/torch/distributed/distributed_c10d.py:2500 all_gather", *(f"/y/train.py:{n} main" for n in range(40, 50)))
READ = ("/y/data.py:3 read", *GATHER[1:])
ENTERED = Entered("0", 9, "all_gather", waits=True)
WAITS = Seen(0, state="sleeps", step=5, phase="step", frames=GATHER, flight=(ENTERED,))
READS = WAITS._replace(frames=READ, state="runs", flight=(Entered("0", 8, "barrier"),))


def does(rank: int, odd_rank: int) -> Seen:
    return (READS if rank == odd_rank else WAITS)._replace(rank=rank, node=f"n{rank // EACH + 1}")


def plan(folder: Path, nodes: int) -> dict[str, Any]:
    world = {"nodes": [{"name": f"n{number + 1}"} for number in range(nodes)], "ranks_per_node": EACH}
    world["logs_by_node"] = True
    return {"folder": str(folder), "scratch": str(folder / "scratch"), "world": world}


class Cluster:
    """The first node's own code, and that of all others, without the connections between them."""

    def __init__(self, folder: Path, nodes: int, odd_rank: int, silent: int = -1) -> None:
        (folder / "scratch").mkdir()
        (folder / "failures").mkdir()
        self.first, self.count, self.messages = hang.Hang(plan(folder, nodes), 0, 0), 0, 0
        self.bytes = self.asked = 0
        late = [odd_rank, 5, heartbeat.STEP, 700.0, 600.0]
        (begins,) = self.first.hear(odd_rank // EACH, {"late": late})
        assert "hang" in begins
        for node in range(1, nodes):
            own = Alike()
            for rank in range(node * EACH, (node + 1) * EACH):
                own.add(does(rank, odd_rank))
            told = own.told()
            while told:
                message = told.pop(0)
                for reply in self.tell(node, message):
                    self.asked += 1
                    told += own.tell(reply["tell"]) if node != silent else []
            self.tell(node, {"looked": node})
        while self.first.open:
            self.first.look()
            time.sleep(0.01)

    def tell(self, node: int, message: dict[str, Any]) -> list[dict[str, Any]]:
        text = json.dumps(message)
        self.bytes, self.messages = self.bytes + len(text), self.messages + 1
        return self.first.hear(node, json.loads(text))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node's own ranks wait, too."""
    monkeypatch.setattr(stacks, "save", lambda at, beat, began: does(at.rank, -1))
    monkeypatch.setattr(hang, "_EVIDENCE_S", 120.0)


@pytest.mark.usefixtures("seen")
def test_a_stack_crosses_the_wire_once_and_the_odd_rank_is_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 400, odd_rank=1337)
    why = cluster.first.named
    assert why is not None
    assert (why.rank, why.node) == (1337, "n168")
    assert why.problem == (
        "hang: rank 1337 on n168 has not entered all_gather, collective 9 of group 0, in which 3199 ranks wait: at "
        "step 5, in read (/y/data.py:3), called by main (/y/train.py:40), called by main (/y/train.py:41); rank 1337 "
        "made no progress for 700 s (limit 600 s)"
    )
    # 3,192 ranks of other nodes: a message of each node, one more of the odd rank's, and no more stacks than there are.
    assert cluster.messages == 2 * 399 + 1 + cluster.asked
    assert 1 <= cluster.asked <= 2
    assert cluster.bytes / 399 < 350
    lines = [json.loads(line) for line in (tmp_path / "hang" / "seen.jsonl").read_text().splitlines()]
    assert [(line["count"], line["ranks"], line["nodes"]) for line in lines] == [
        (1, "1337", "n168"),
        (3199, "0-1336,1338-3199", "n[1-400]"),
    ]
    assert lines[0] == {
        "count": 1, "ranks": "1337", "nodes": "n168", "step": 5, "phase": "step", "state": "runs", "frames": [*READ],
        "flight": [{"group": "0", "number": 8, "name": "barrier", "waits": False, "ranks": 1}],
    }  # fmt: skip
    assert json.loads((tmp_path / "failures" / "hang.json").read_text())["last_lines"] == [*READ]


@pytest.mark.seconds
@pytest.mark.usefixtures("seen")
def test_a_stack_that_its_node_does_not_tell_is_not_waited_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_EVIDENCE_S", 0.5)
    cluster = Cluster(tmp_path, 3, odd_rank=16, silent=2)
    assert cluster.first.named is not None
    assert cluster.first.named.rank == 16
    assert '["<its stack is not known>"]' in (tmp_path / "hang" / "seen.jsonl").read_text()


def told(*seen: Seen) -> list[dict[str, Any]]:
    own = Alike()
    for one in seen:
        own.add(one)
    return own.told()


def test_the_first_node_asks_three_nodes_at_most_for_a_stack_and_for_a_thousand_stacks() -> None:
    first = Alike()
    asked = []
    for node in range(1, 6):
        (message,) = told(WAITS._replace(rank=node))
        asked += first.hear(range(node, node + 1), f"n{node}", message["seen"])
    assert len(asked) == 3
    for rank in range(6, 2006):
        (message,) = told(WAITS._replace(rank=rank, frames=(f"/y/train.py:{rank} main",)))
        asked += first.hear(range(rank, rank + 1), "n", message["seen"])
    assert len(asked) == 3 + 999
    assert first.waits
    known = first.all(dict.fromkeys(range(2007), "n"))
    assert (known[0].state, known[1].frames, known[2006].state) == ("unseen", alike._LOST, "unseen")


def test_ranks_that_differ_in_anything_are_told_apart() -> None:
    kinds = (WAITS, WAITS._replace(step=6), WAITS._replace(flight=()), WAITS._replace(phase="end"), READS)
    ranks = [kind._replace(rank=rank) for rank, kind in enumerate((*kinds, *kinds))]
    assert [message["seen"]["rank"] for message in told(*ranks)] == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]


GOOD = told(WAITS._replace(rank=2))[0]["seen"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": []}, {"rank": 2}, {"rank": [2, 0]}, {"rank": [True]}, {"rank": ["2"]}, {"rank": [10**9]},
        {"frames": None}, {"frames": []}, {"frames": "short"}, {"frames": ["a"]}, {"flight": [[1, 2]]}, {"step": "5"},
        {"state": None}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_not_believed(wrong: dict[str, Any]) -> None:
    with pytest.raises(channel.BrokenError):
        Alike().hear(range(2, 4), "n2", {**GOOD, **wrong})


@pytest.mark.parametrize("frames", [None, 1, "text", ["unasked"], [1], [["a"]], {"a": 1}])
def test_a_stack_that_nobody_has_asked_for_is_not_believed(frames: Any) -> None:
    first = Alike()
    assert first.hear(range(2, 4), "n2", GOOD) == [{"tell": GOOD["frames"]}]
    with pytest.raises(channel.BrokenError):
        first.keep(frames)
    first.keep(list(GATHER))
    assert not first.waits


def test_the_time_to_find_the_odd_rank_grows_with_the_ranks_and_not_faster() -> None:
    """Half of them wait elsewhere, in groups of eight, as with shards of a node."""

    def took(ranks: int) -> float:
        def one(rank: int) -> Seen:
            flight = (ENTERED._replace(group=str(rank // 8)),)
            return (WAITS if rank % 2 else READS)._replace(rank=rank, flight=flight)

        seen = [one(rank) for rank in range(ranks)]
        began = time.process_time()
        odd.odd(seen)
        return time.process_time() - began

    assert took(16_000) < 40 * min(took(2_000) for _ in range(3)) + 0.05
