"""The preflight's ring of neighbours: a slow link, or a slow node, has a name."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
links = pytest.importorskip("dray.checks.links")

SIZES = [3, 4, 5, 8, 9, 10_000, 10_001]
NAMES = [f"n{number}" for number in range(1, 9)]


@pytest.mark.parametrize("nodes", SIZES)
def test_each_link_of_the_ring_is_measured_once_in_two_or_three_rounds(nodes: int) -> None:
    assert links.rounds(nodes) <= 3
    met = []
    for turn in range(links.rounds(nodes)):
        partners = [links.partner(node, turn, nodes) for node in range(nodes)]
        assert all(other is None or partners[other] == node for node, other in enumerate(partners))
        met += [frozenset((node, other)) for node, other in enumerate(partners) if other is not None and node < other]
    assert len(met) == len({*met}) == nodes
    assert {*met} == {frozenset((node, (node + 1) % nodes)) for node in range(nodes)}


def of(nodes: int, each: int, slow: dict[tuple[int, int], float]) -> list[links.Link]:
    """What the nodes reach, 20 GB/s but for these links, told by one end alone."""
    reached = [
        [
            slow.get((rank // each, links.partner(rank // each, turn, nodes)), 20.0)
            for turn in range(links.rounds(nodes))
        ]
        for rank in range(nodes * each)
    ]
    return links.joined(reached, links.Ring(nodes, each, inside=False))


@pytest.mark.parametrize(
    ("nodes", "slow", "told"),
    [
        (8, {}, []),
        (8, {(1, 2): 0.4}, ["n2 to n3: 0.4 GB/s, the others 20"]),
        (8, {(7, 0): 0.4}, ["n8 to n1: 0.4 GB/s, the others 20"]),
        (3, {(2, 0): 4.9}, ["n3 to n1: 4.9 GB/s, the others 20"]),
        (3, {(2, 0): 5.1}, []),
        (3, {(1, 0): 0.4, (1, 2): 0.5}, ["n2 to both of its neighbours: 0.4 GB/s, the others 20"]),
        (8, {(4, 3): 0.4, (4, 5): 0.5}, ["n5 to both of its neighbours: 0.4 GB/s, the others 20"]),
        (8, {(0, 1): 0.1, (4, 5): 0.0}, ["n1 to n2: 0.1 GB/s, the others 20", "n5 to n6: 0 GB/s, the others 20"]),
    ],
)
@pytest.mark.parametrize("each", [1, 4])
def test_what_is_far_below_the_others_is_named(nodes: int, slow: dict, told: list[str], each: int) -> None:
    assert links.slow(of(nodes, each, slow), NAMES[:nodes]) == told


def test_no_link_is_no_news() -> None:
    assert links.slow([], []) == []


def inside(nodes: int, each: int, slow: dict[tuple[int, int], float], usual: dict[int, float] | None = None) -> list:
    """What the ranks of each node reach: 40 GB/s, or as the first of two local ranks has it, but for these links."""
    reached = []
    for rank in range(nodes * each):
        node, local = divmod(rank, each)
        others = [links.partner(local, turn, each) for turn in range(links.rounds(each))]
        first = [local if other is None or other == (local + 1) % each else other for other in others]
        peers = [None if other is None else node * each + other for other in others]
        fast = [(usual or {}).get(one, 40.0) for one in first]
        reached.append([slow.get((rank, peer), gb_s) for peer, gb_s in zip(peers, fast, strict=True)])
    return links.joined(reached, links.Ring(each, nodes, inside=True))


@pytest.mark.parametrize("each", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("nodes", [1, 5])
def test_each_link_in_a_node_is_measured_once(nodes: int, each: int) -> None:
    found = inside(nodes, each, {})
    assert len(found) == nodes * (each if each > 2 else 1)
    assert len({(link.ring, frozenset((link.a, link.b))) for link in found}) == len(found)
    ring = links.Ring(each, nodes, inside=True)
    assert [ring.rank(*ring.place(rank)) for rank in range(nodes * each)] == list(range(nodes * each))


# Two chips of a package: every second link has four times the speed.
CHIPS = dict.fromkeys(range(0, 8, 2), 200.0) | dict.fromkeys(range(1, 8, 2), 48.0)


@pytest.mark.parametrize(
    ("nodes", "each", "usual", "slow", "told"),
    [
        (5, 8, None, {}, []),
        (5, 8, None, {(19, 20): 2.0}, ["n3: rank 19 to rank 20: 2 GB/s, the others 40"]),
        (5, 8, None, {(20, 19): 2.0}, ["n3: rank 19 to rank 20: 2 GB/s, the others 40"]),
        (5, 8, None, {(16, 23): 2.0}, ["n3: rank 23 to rank 16: 2 GB/s, the others 40"]),
        (
            5, 8, None, {(19, 18): 2.0, (19, 20): 3.0, (33, 32): 1.0},
            ["n3: rank 19 to both of its neighbours: 2 GB/s, the others 40",
             "n5: rank 32 to rank 33: 1 GB/s, the others 40"],
        ),
        (5, 2, None, {(4, 5): 2.0}, ["n3: rank 4 to rank 5: 2 GB/s, the others 40"]),
        (5, 8, CHIPS, {}, []),
        (5, 8, CHIPS, {(16, 17): 48.0}, ["n3: rank 16 to rank 17: 48 GB/s, the others 200"]),
        (1, 8, CHIPS, {}, []),
        (1, 8, CHIPS, {(3, 4): 2.0}, ["n1: rank 3 to rank 4: 2 GB/s, the others 200"]),
        (1, 8, None, {(3, 4): 5.1}, []),
    ],
)  # fmt: skip
def test_a_slow_link_in_a_node_is_named(nodes: int, each: int, usual: dict | None, slow: dict, told: list[str]) -> None:
    """Held against the same two ranks of other nodes, where there are some."""
    assert links.slow_inside(inside(nodes, each, slow, usual), NAMES[:nodes], each) == told
