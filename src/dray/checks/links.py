"""The preflight's look at single links: each node exchanges data with two neighbours, so that a slow one has a name.

The nodes are a ring, by the plan's order. Two rounds measure all of its links, three where the number of nodes is odd:
in each round every node has one partner, and all pairs measure at once, so the time does not grow with the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from dray.checks.preflight import Rank

FEWEST = 3  # nodes: two have one link, which the all-reduce measures
_BYTES = 16 << 20
_TIMES = 3
_SLOW, _USUAL = 4.0, 0.75  # times slower than the link that is faster than three quarters of all
_SHOWN = 8


class Link(NamedTuple):
    """What two nodes reached."""

    a: int
    b: int
    rail: int
    """The local rank of both ends."""
    gb_s: float


def rounds(nodes: int) -> int:
    """In how many each node has exchanged data with both neighbours."""
    return 2 + nodes % 2


def partner(node: int, turn: int, nodes: int) -> int | None:
    """With whom a node exchanges in a round; an odd ring leaves one node out of each."""
    first, last = 0, nodes - 1
    if turn == rounds(nodes) - 1 and node in (first, last):
        return last - node
    other = node + 1 if node % 2 == turn else node - 1
    return other if turn < 2 and 0 <= other < nodes else None


def measure(rank: Rank, device: torch.device) -> list[Link]:
    """All links of the ring, known to all ranks."""
    each, names = rank.plan["world"]["ranks_per_node"], rank.plan["world"]["nodes"]
    node, rail = divmod(rank.number, each)
    count = min(_BYTES, rank.plan["preflight"]["megabytes"] << 20) // 4
    own, theirs = torch.ones(count, device=device), torch.empty(count, device=device)
    reached = torch.zeros(rounds(len(names)), dtype=torch.float64, device=device)
    for turn in range(rounds(len(names))):
        rank.phase(f"neighbours, round {turn + 1}")
        other = partner(node, turn, len(names))
        dist.barrier()
        if other is not None:
            best = min(_exchange(own, theirs, other * each + rail) for _ in range(_TIMES))
            reached[turn] = count * 4 / best / 1e9
    pieces = [torch.zeros_like(reached) for _ in range(rank.size)]
    dist.all_gather(pieces, reached)
    return joined([[float(value) for value in piece] for piece in pieces], each)


def _exchange(own: torch.Tensor, theirs: torch.Tensor, peer: int) -> float:
    """Seconds for both directions at once."""
    began = time.perf_counter()
    ways = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for way in dist.batch_isend_irecv(ways):
        way.wait()
    if own.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def joined(reached: Sequence[Sequence[float]], each: int) -> list[Link]:
    """Each link once, by the end that was slower; `reached` is what each rank has in each round."""
    nodes, found = len(reached) // each, []
    for node in range(nodes):
        for turn in range(rounds(nodes)):
            other = partner(node, turn, nodes)
            if other == (node + 1) % nodes:
                for rail in range(each):
                    ends = (reached[one * each + rail][turn] for one in (node, other))
                    found.append(Link(node, other, rail, min(ends)))
    return found


def slow(links: Sequence[Link], names: Sequence[str]) -> list[str]:
    """A line for each node or link that is far below the others: `n17 to n18: 0.4 GB/s, the others 20`."""
    # Not the median: one slow node of three has two of three links.
    usual = sorted(link.gb_s for link in links)[ceil(_USUAL * (len(links) - 1))] if links else 0.0
    worst: dict[tuple[int, int], float] = {}
    for link in links:
        if link.gb_s * _SLOW < usual:
            worst[link.a, link.b] = min(link.gb_s, worst.get((link.a, link.b), link.gb_s))
    if not worst:
        return []
    both = {b: (worst[a, b], worst[b, c]) for a, b in worst for x, c in worst if x == b}
    others = f"GB/s, the others {usual:.3g}"
    lines = [f"{names[node]} to both of its neighbours: {min(pair):.2g} {others}" for node, pair in both.items()]
    lines += [
        f"{names[a]} to {names[b]}: {gb_s:.2g} {others}" for (a, b), gb_s in worst.items() if not {a, b} & both.keys()
    ]
    return lines[:_SHOWN]
