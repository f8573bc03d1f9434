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
    return links.joined(reached, each)


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
