"""Measures single links in the preflight: each rank exchanges data with two neighbours, and slow links are named.

The nodes form a ring in the plan's order for each local rank, and the ranks of each node form one. All ranks of a ring
measure at once: the time does not grow with the nodes. A rank is as fast as the slower of its two links, so a link is
slow if both of its ends are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dray.checks.device import now

if TYPE_CHECKING:
    from dray.checks.rank import Rank

FEWEST = 4  # nodes, or ranks of a node: in a ring of three a slow one slows all links
_BYTES = 16 << 20
_TIMES = 3
_SLOW, _USUAL = 4.0, 0.75  # times slower than the link that is faster than three quarters of all
_SLOW_PAIRS = 8.0  # where GPUs of one node are compared: an MI250X's halves have four times the links of others
_SHOWN = 8
Link = tuple[int, int]
"""Two ranks that follow one another in a ring."""


def rings(nodes: int, each: int, *, inside: bool) -> list[list[int]]:
    """The ranks of each ring: `inside` each node, or of all nodes for each local rank."""
    if inside:
        return [list(range(node * each, (node + 1) * each)) for node in range(nodes)]
    return [list(range(local, nodes * each, each)) for local in range(each)]


def find_slow(rank: Rank, device: torch.device) -> list[str]:
    """A line for each node, rank or link that is far slower than the others; the same on all ranks."""
    each, names = rank.plan["world"]["ranks_per_node"], [node["name"] for node in rank.plan["world"]["nodes"]]
    lines = []
    for inside, phase in ((False, "neighbours"), (True, "neighbours in the node")):
        members = each if inside else len(names)
        if members > 1 and max(members, len(names)) >= FEWEST:
            rank.phase(phase)
            lines += slow(_measure(rank, device, rings(len(names), each, inside=inside)), names, each, inside=inside)
    return lines


def _measure(rank: Rank, device: torch.device, of: list[list[int]]) -> dict[Link, float]:
    """GB/s of all links of the rings, known to all ranks."""
    ring = next(ring for ring in of if rank.number in ring)
    at = ring.index(rank.number)
    count = min(_BYTES, rank.plan["preflight"]["megabytes"] << 20) // 4
    own, reached = torch.ones(count, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_TIMES):
        dist.barrier()
        reached[0] = max(float(reached), 2 * count * 4 / 1e9 / _exchange(own, ring[at - 1], ring[(at + 1) % len(ring)]))
    return joined([float(piece) for piece in all_gather(reached)], of)


def all_gather(own: torch.Tensor) -> list[torch.Tensor]:
    """What each rank has, in the CPU's memory."""
    pieces = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, own)
    return [piece.cpu() for piece in pieces]


def _exchange(own: torch.Tensor, *peers: int) -> float:
    """Seconds for both directions with both neighbours at once."""
    ways = [dist.P2POp(dist.isend, own, peer) for peer in peers]
    ways += [dist.P2POp(dist.irecv, torch.empty_like(own), peer) for peer in peers]
    began = now(own.device)
    for way in dist.batch_isend_irecv(ways):
        way.wait()
    return now(own.device) - began


def joined(reached: Sequence[float], of: list[list[int]]) -> dict[Link, float]:
    """Each link once, with the speed of its faster end."""
    links: dict[Link, float] = {}
    for ring in of:
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            if (b, a) not in links:  # two ranks have one link
                links[a, b] = max(reached[a], reached[b])
    return links


def slow(links: Mapping[Link, float], names: Sequence[str], each: int, *, inside: bool) -> list[str]:
    """Slow links between nodes: `n17 to n18: 0.4 GB/s, the others 20`. A node's slowest ring counts.

    In nodes: `n17: rank 131 to rank 132: 2 GB/s, the others 40`; others: the same pair on other nodes.
    """
    times = _SLOW_PAIRS if inside and len(names) < FEWEST else _SLOW

    def kind(link: Link) -> object:
        """What the links have in common with which this one is compared."""
        if not inside:
            return "between nodes"
        return (link[0] % each, link[1] % each) if len(names) >= FEWEST else link[0] // each

    alike: dict[object, list[float]] = {}
    for link, gb_s in sorted(links.items(), key=lambda item: item[1]):
        alike.setdefault(kind(link), []).append(gb_s)
    far: dict[tuple[str, str], tuple[float, float]] = {}
    for (a, b), gb_s in links.items():
        speeds = alike[kind((a, b))]
        usual = speeds[ceil(_USUAL * (len(speeds) - 1))]  # not the median: one slow node of four has two of four links
        if gb_s * times < usual:
            ends = names[a // each], names[b // each]
            if inside:
                ends = f"{ends[0]}: rank {a}", f"{ends[1]}: rank {b}"
            far[ends] = min((gb_s, usual), far.get(ends, (gb_s, usual)))
    return _lines(far)


def _lines(far: Mapping[tuple[str, str], tuple[float, float]]) -> list[str]:
    """A line for each link; a member with two slow links is named once, unless a neighbour has two as well."""
    slow_links = Counter(member for link in far for member in link)
    last = [link for link in far if slow_links[link[0]] + slow_links[link[1]] == 3]  # one end has no other slow link
    slow_members = Counter(member for link in last for member in link)
    speeds: dict[str, tuple[float, float]] = {}
    for (a, b), speed in far.items():
        who = f"{a} to {b.rpartition(': ')[2]}"
        if 2 in (slow_members[a], slow_members[b]):
            who = f"{a if slow_members[a] == 2 else b} to both of its neighbours"
        speeds[who] = min(speed, speeds.get(who, speed))
    return [f"{who}: {gb_s:.2g} GB/s, the others {usual:.3g}" for who, (gb_s, usual) in speeds.items()][:_SHOWN]
