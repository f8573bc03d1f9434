"""Measures single links in the preflight: each rank exchanges data with two neighbours, and slow links are named.

The nodes form a ring in the plan's order, and so do the ranks of each node. Two rounds measure all links of a ring,
three if its number of members is odd. In each round every member has one partner, and all pairs measure at once: the
time does not grow with the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from dray.checks.rank import Rank

FEWEST = 3  # nodes, or ranks of a node: two have one link, which the all-reduce measures
_BYTES = 16 << 20
_TIMES = 3
_SLOW, _USUAL = 4.0, 0.75  # times slower than the link that is faster than three quarters of all
_SLOW_PAIRS = 8.0  # where GPUs of one node are compared: an MI250X's halves have four times the links of others
_SHOWN = 8


class Ring(NamedTuple):
    """Rings of equal size: of all nodes, one ring for each local rank; or of the ranks of a node, one in each node."""

    members: int
    rings: int
    inside: bool
    """Whether each ring is in one node."""

    def rank(self, member: int, ring: int) -> int:
        """The rank of this member in this ring."""
        return ring * self.members + member if self.inside else member * self.rings + ring

    def place(self, rank: int) -> tuple[int, int]:
        """The member and the ring of this rank."""
        high, low = divmod(rank, self.members if self.inside else self.rings)
        return (low, high) if self.inside else (high, low)


class Link(NamedTuple):
    """The bandwidth between two members of a ring."""

    a: int
    b: int
    ring: int
    gb_s: float


def rounds(members: int) -> int:
    """The rounds after which each member has exchanged data with both neighbours."""
    return 2 + members % 2


def partner(member: int, turn: int, members: int) -> int | None:
    """The member with which this one exchanges data in a round; None if an odd ring leaves it out."""
    first, last = 0, members - 1
    if turn == rounds(members) - 1 and member in (first, last):
        return last - member if members > 2 else None
    other = member + 1 if member % 2 == turn else member - 1
    return other if turn < 2 and 0 <= other < members else None


def find_slow(rank: Rank, device: torch.device) -> list[str]:
    """A line for each node, rank or link that is far slower than the others; the same on all ranks."""
    each, names = rank.plan["world"]["ranks_per_node"], [node["name"] for node in rank.plan["world"]["nodes"]]
    found = []
    if len(names) >= FEWEST:
        found += slow(_measure(rank, device, Ring(len(names), each, inside=False)), names)
    if each > 1 and max(each, len(names)) >= FEWEST:
        found += slow_inside(_measure(rank, device, Ring(each, len(names), inside=True)), names, each)
    return found


def _measure(rank: Rank, device: torch.device, ring: Ring) -> list[Link]:
    """All links of the rings, known to all ranks."""
    member, own_ring = ring.place(rank.number)
    count = min(_BYTES, rank.plan["preflight"]["megabytes"] << 20) // 4
    own, theirs = torch.ones(count, device=device), torch.empty(count, device=device)
    reached = torch.zeros(rounds(ring.members), dtype=torch.float64, device=device)
    for turn in range(rounds(ring.members)):
        rank.phase(f"neighbours{' in the node' * ring.inside}, round {turn + 1}")
        other = partner(member, turn, ring.members)
        dist.barrier()
        if other is not None:
            best = min(_exchange(own, theirs, ring.rank(other, own_ring)) for _ in range(_TIMES))
            reached[turn] = count * 4 / best / 1e9
    pieces = [torch.zeros_like(reached) for _ in range(rank.size)]
    dist.all_gather(pieces, reached)
    return joined([[float(value) for value in piece] for piece in pieces], ring)


def _exchange(own: torch.Tensor, theirs: torch.Tensor, peer: int) -> float:
    """Seconds for both directions at once."""
    began = time.perf_counter()
    ways = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for way in dist.batch_isend_irecv(ways):
        way.wait()
    if own.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def joined(reached: Sequence[Sequence[float]], ring: Ring) -> list[Link]:
    """Each link once, with the bandwidth of its slower end; `reached` has each rank's in each round."""
    found = []
    for member in range(ring.members):
        for turn in range(rounds(ring.members)):
            other = partner(member, turn, ring.members)
            if other == (member + 1) % ring.members and (ring.members > 2 or other):
                for one in range(ring.rings):
                    ends = (reached[ring.rank(end, one)][turn] for end in (member, other))
                    found.append(Link(member, other, one, min(ends)))
    return found


def slow(links: Sequence[Link], names: Sequence[str]) -> list[str]:
    """Slow links between nodes: `n17 to n18: 0.4 GB/s, the others 20`. A node's slowest ring counts."""
    usual = dict.fromkeys(((link.a, link.b) for link in links), _usual(links))
    return _told(_far_below(links, usual, _SLOW), usual, names)[:_SHOWN]


def slow_inside(links: Sequence[Link], names: Sequence[str], each: int) -> list[str]:
    """Slow links in nodes: `n17: rank 131 to rank 132: 2 GB/s, the others 40`; others: the same pair on other nodes."""
    pairs: dict[tuple[int, int], list[Link]] = {}
    rings: dict[int, list[Link]] = {}
    for link in links:
        pairs.setdefault((link.a, link.b), []).append(link)
        rings.setdefault(link.ring, []).append(link)
    alike = len(names) >= FEWEST
    usual = {pair: _usual(of if alike else links) for pair, of in pairs.items()}
    lines = []
    for node, own in rings.items():
        ranks = [f"rank {node * each + member}" for member in range(each)]
        far = _far_below(own, usual, _SLOW if alike else _SLOW_PAIRS)
        lines += [f"{names[node]}: {line}" for line in _told(far, usual, ranks)]
    return lines[:_SHOWN]


def _usual(links: Sequence[Link]) -> float:
    # Not the median: one slow node of three has two of three links.
    return sorted(link.gb_s for link in links)[ceil(_USUAL * (len(links) - 1))] if links else 0.0


def _far_below(
    links: Iterable[Link], usual: Mapping[tuple[int, int], float], times: float
) -> dict[tuple[int, int], float]:
    worst: dict[tuple[int, int], float] = {}
    for link in links:
        pair = link.a, link.b
        if link.gb_s * times < usual[pair]:
            worst[pair] = min(link.gb_s, worst.get(pair, link.gb_s))
    return worst


def _told(
    worst: Mapping[tuple[int, int], float], usual: Mapping[tuple[int, int], float], names: Sequence[str]
) -> list[str]:
    """The lines; a member with two slow links is named once."""
    both = {b: ((a, b), (b, c)) for a, b in worst for x, c in worst if x == b}

    def line(who: str, *links: tuple[int, int]) -> str:
        link = min(links, key=worst.__getitem__)
        return f"{who}: {worst[link]:.2g} GB/s, the others {usual[link]:.3g}"

    lines = [line(f"{names[member]} to both of its neighbours", *two) for member, two in both.items()]
    return lines + [line(f"{names[a]} to {names[b]}", (a, b)) for a, b in worst if not {a, b} & both.keys()]
