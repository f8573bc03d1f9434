"""The preflight's ring of neighbours: a slow link, or a slow node, has a name."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
network = pytest.importorskip("dray.checks.network")

NAMES = [f"n{number}" for number in range(1, 9)]
# Two chips of a package: every second link has four times the speed.
CHIPS = {first: 48.0 if first % 2 else 200.0 for first in range(8)}


def measured(nodes: int, each: int, slow: dict[tuple[int, int], float], usual: dict[int, float], *, inside: bool):
    """The links by what their ranks reach: the slower of both, 40 GB/s or what is `usual` after this member."""
    rings = network.rings(nodes, each, inside=inside)
    reached = [1000.0] * (nodes * each)
    for ring in rings:
        for member, rank in enumerate(ring):
            after = ring[(member + 1) % len(ring)]
            gb_s = slow.get((rank, after), usual.get(member, 40.0))
            for end in (rank, after):
                reached[end] = min(reached[end], gb_s)
    return network.join_links(reached, rings)


@pytest.mark.parametrize(("nodes", "each"), [(3, 1), (8, 4), (1, 2), (5, 2), (2, 8), (1, 7)])
@pytest.mark.parametrize("inside", [False, True])
def test_each_link_is_measured_once(nodes: int, each: int, inside: bool) -> None:
    members, rings = (each, nodes) if inside else (nodes, each)
    of = network.rings(nodes, each, inside=inside)
    assert sorted(rank for ring in of for rank in ring) == list(range(nodes * each))
    if members > 1:
        found = measured(nodes, each, {}, {}, inside=inside)
        assert len({frozenset(link) for link in found}) == len(found) == rings * (members if members > 2 else 1)


@pytest.mark.parametrize(
    ("nodes", "slow", "told"),
    [
        (8, {}, []),
        (8, {(1, 2): 0.4}, ["n2 to n3: 0.4 GB/s, the others 40"]),
        (8, {(7, 0): 0.4}, ["n8 to n1: 0.4 GB/s, the others 40"]),
        (4, {(3, 0): 9.9}, ["n4 to n1: 9.9 GB/s, the others 40"]),
        (4, {(3, 0): 10.1}, []),
        (4, {(0, 1): 0.4, (1, 2): 0.5}, ["n2 to both of its neighbours: 0.4 GB/s, the others 40"]),
        (8, {(3, 4): 0.4, (4, 5): 0.5}, ["n5 to both of its neighbours: 0.4 GB/s, the others 40"]),
        (  # n2 is well: n1 and n3 may be slow, or one of them and a link
            8,
            {(7, 0): 0.4, (0, 1): 0.4, (1, 2): 0.4, (2, 3): 0.4},
            [
                f"{a} to {b}: 0.4 GB/s, the others 40"
                for a, b in (("n1", "n2"), ("n2", "n3"), ("n3", "n4"), ("n8", "n1"))
            ],
        ),
        (8, {(0, 1): 0.1, (4, 5): 0.0}, ["n1 to n2: 0.1 GB/s, the others 40", "n5 to n6: 0 GB/s, the others 40"]),
    ],
)
@pytest.mark.parametrize("each", [1, 4])
def test_a_slow_link_between_nodes_is_named(nodes: int, slow: dict, told: list[str], each: int) -> None:
    """Also if it is slow for one local rank alone."""
    ranks = {(a * each, b * each): gb_s for (a, b), gb_s in slow.items()}
    links = measured(nodes, each, ranks, {}, inside=False)
    assert network.describe_slow_links(links, NAMES[:nodes], each, inside=False) == told


@pytest.mark.parametrize(
    ("nodes", "each", "usual", "slow", "told"),
    [
        (5, 8, {}, {}, []),
        (5, 8, {}, {(19, 20): 2.0}, ["n3: rank 19 to rank 20: 2 GB/s, the others 40"]),
        (5, 8, {}, {(23, 16): 2.0}, ["n3: rank 23 to rank 16: 2 GB/s, the others 40"]),
        (
            5, 8, {}, {(18, 19): 2.0, (19, 20): 3.0, (32, 33): 1.0},
            ["n3: rank 19 to both of its neighbours: 2 GB/s, the others 40",
             "n5: rank 32 to rank 33: 1 GB/s, the others 40"],
        ),
        (5, 2, {}, {(4, 5): 2.0, (5, 4): 2.0}, ["n3: rank 4 to rank 5: 2 GB/s, the others 40"]),
        (1, 8, CHIPS, {}, []),
        (1, 8, CHIPS, {(3, 4): 2.0}, ["n1: rank 3 to rank 4: 2 GB/s, the others 48"]),
        (1, 8, {}, {(3, 4): 5.1}, []),
    ],
)  # fmt: skip
def test_a_slow_link_in_a_node_is_named(nodes: int, each: int, usual: dict, slow: dict, told: list[str]) -> None:
    """Held against the same two ranks of other nodes, where there are some."""
    links = measured(nodes, each, slow, usual, inside=True)
    assert network.describe_slow_links(links, NAMES[:nodes], each, inside=True) == told
