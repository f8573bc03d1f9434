"""The preflight's network: collectives of all ranks, their results, bandwidth and transport, and slow links by name."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dray.checks import transport
from dray.checks.device import now
from dray.contract.findings import UnfitError, counted
from dray.contract.processes import unprinted

if TYPE_CHECKING:
    from dray.checks.rank import Rank

_ROUNDS = 3
_MOST_WRONG = 8  # ranks that have sent wrong data, as one rank tells them
_JSON = 512  # bytes of a rank's values
_PATTERN, _ALL = 1 << 16, 1 << 24  # numbers of a rank, and the most of all ranks together, all of which each rank holds
_BANDWIDTH_NODES = 8  # with more nodes, latency and not bandwidth limits messages of this size
_SUSPECT = "leave that node out (sbatch --exclude), and tell the cluster's administrators"
_FEWEST = 4  # nodes, or ranks of a node: in a ring of three a slow one slows all links
_LINK_BYTES = 16 << 20
_EXCHANGES = 3
_SLOW, _USUAL = 4.0, 0.75  # times slower than the link that is faster than three quarters of all
_SLOW_PAIRS = 8.0  # where GPUs of one node are compared: an MI250X's halves have four times the links of others
_SHOWN_LINKS = 8
Link = tuple[int, int]
"""Two ranks that follow one another in a ring."""


def suite(rank: Rank, log: Path) -> dict[str, Any]:
    """Run all collectives and return the report, or raise UnfitError."""
    rank.phase("device")
    device = torch.device("cpu")
    if rank.plan["variant"] != "cpu":
        device = torch.device("cuda", rank.local)
        torch.cuda.set_device(device)
    rank.phase("rendezvous")
    # Keys of its own in the store that the launcher's ranks use next.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("preflight", store),  # type: ignore[attr-defined]
        rank=rank.number,
        world_size=rank.size,
    )
    rank.deadline(rank.plan["preflight"]["timeout_s"])
    rank.phase("all-reduce")
    _require_right_sum(rank, torch.full((1,), rank.number, device=device), "the all-reduce")
    rank.phase("all-gather")
    length = min(_PATTERN, _ALL // rank.size)
    pieces = _all_gather(_pattern(rank.number, length).to(device))
    wrong = [number for number, piece in enumerate(pieces) if not torch.equal(piece, _pattern(number, length))]
    _require_right_data(rank, _all_gather_json(wrong[:_MOST_WRONG], device))
    rank.phase("control group")
    with unprinted():  # as the trainer has one beside NCCL's
        control = dist.new_group(backend="gloo")
    _require_right_sum(rank, torch.full((1,), rank.number), "gloo's all-reduce", control)
    slow_links = find_slow_links(rank, device)
    rank.phase("bandwidth")
    sweep = _sweep(rank, device)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    used = transport.used(lines)
    indirect = transport.indirect(lines, used)
    if indirect:
        rank.report(indirect)
    _require_fabric(rank, used, max((row["bus_gb_s"] for row in sweep), default=0.0), slow_links)
    name = used.name if used else "gloo over TCP" if device.type == "cpu" else "within the node"
    about = {"node": rank.node, "transport": name} | ({"warning": indirect.problem} if indirect else {})
    ranks = _all_gather_json(about, device)
    if device.type == "cuda":  # NCCL may still be sending when its kernel has ended
        dist.destroy_process_group()
    rank.phase("done")
    return {"seconds": rank.seconds, "sweep": sweep, "ranks": ranks, "slow_links": slow_links}


def _all_gather(own: torch.Tensor) -> list[torch.Tensor]:
    """What each rank has, in the CPU's memory."""
    pieces = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, own)
    return [piece.cpu() for piece in pieces]


def _all_gather_json(value: object, device: torch.device) -> list[Any]:
    """Every rank's value, which is short: torch's own for objects unpickles what others send."""
    content = json.dumps(value).encode().ljust(_JSON)
    pieces = _all_gather(torch.tensor(list(content), dtype=torch.uint8, device=device))
    return [json.loads(bytes(piece.tolist())) for piece in pieces]


def _require_right_sum(rank: Rank, total: torch.Tensor, what: str, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(total, group=group)
    wanted = sum(range(rank.size))
    if total.item() != wanted:
        raise UnfitError(f"{what} over all ranks is wrong", wanted=wanted, found=total.item(), fix=_SUSPECT)


def _require_right_data(rank: Rank, reports: list[list[int]]) -> None:
    """Name the rank in most of the pairs whose data differs: it is at fault, as sender or as receiver."""
    pairs = {frozenset((sender, receiver)) for receiver, senders in enumerate(reports) for sender in senders}
    if not pairs:
        return
    count = Counter(number for pair in pairs for number in pair)
    faulty = sorted(number for number in count if count[number] == max(count.values()))
    raise UnfitError(
        f"wrong data from {' or '.join(f'rank {number} on {rank.node_of(number)}' for number in faulty[:4])}",
        wanted="the data that each rank has sent in the all-gather",
        found=f"different data between {counted(len(pairs), 'pair')} of ranks",
        fix=_SUSPECT,
        node=rank.node_of(faulty[0]),
        rank=faulty[0],
    )


def _pattern(rank: int, length: int) -> torch.Tensor:
    return (torch.arange(length, dtype=torch.int64) * 2654435761 + rank * 40503) % 1000003


def _sweep(rank: Rank, device: torch.device) -> list[dict[str, float]]:
    """Bus bandwidth by message size, as nccl-tests defines it."""
    rows = []
    size = 1 << 14
    while size <= rank.plan["preflight"]["megabytes"] << 20:
        values = torch.zeros(size // 4, device=device)
        dist.all_reduce(values)  # the first one of a size also sets it up
        dist.barrier()
        began = now(device)
        for _ in range(_ROUNDS):
            dist.all_reduce(values)
        took = (now(device) - began) / _ROUNDS
        rows.append({"bytes": size, "bus_gb_s": round(2 * (rank.size - 1) / rank.size * size / took / 1e9, 3)})
        size <<= 4
    return rows


def _require_fabric(rank: Rank, used: transport.Transport | None, best: float, slow_links: list[str]) -> None:
    """Compare the transport and the bandwidth with what the site file expects."""
    fabric, nodes, site = rank.plan["fabric"], len(rank.plan["world"]["nodes"]), rank.plan["site"]
    names = [name.casefold() for name in fabric["transport"]]
    if nodes > 1 and names and rank.plan["variant"] != "cpu" and not (used and used.name.casefold() in names):
        expected = " or ".join(fabric["transport"])
        raise UnfitError(
            f"transport: {expected} required between nodes, rank {rank.number} on {rank.node} uses another",
            wanted=f"{expected} ({site})",
            found=f"{used.name}: {used.problem or used.line}" if used else "NCCL's log names no network",
            fix=(used and used.fix) or "see preflight/nccl-*.log in the run folder, and docs/sites.md",
            node=rank.node,
            rank=rank.number,
        )
    if 1 < nodes <= _BANDWIDTH_NODES and best < fabric["min_bus_bandwidth_gb_s"]:
        raise UnfitError(
            "bus bandwidth between the nodes is below the site's minimum",
            wanted=f"{fabric['min_bus_bandwidth_gb_s']} GB/s (fabric.min_bus_bandwidth_gb_s, {site})",
            found="\n".join([f"{best} GB/s", *slow_links]),
            fix="see preflight/nccl-*.log: does NCCL use a slower network? preflight.when=never skips this check",
        )


def find_slow_links(rank: Rank, device: torch.device) -> list[str]:
    """A line for each node, rank or link that is far slower than the others; the same on all ranks.

    The nodes form a ring in the plan's order for each local rank, and the ranks of each node form one. Each rank
    exchanges data with its two neighbours, and all ranks of a ring measure at once: the time does not grow with the
    nodes. A rank is as fast as the slower of its two links, so a link is slow if both of its ends are.
    """
    each, names = rank.plan["world"]["ranks_per_node"], [node["name"] for node in rank.plan["world"]["nodes"]]
    lines = []
    for inside, phase in ((False, "neighbours"), (True, "neighbours in the node")):
        members = each if inside else len(names)
        if members > 1 and max(members, len(names)) >= _FEWEST:
            rank.phase(phase)
            links = _measure_links(rank, device, rings(len(names), each, inside=inside))
            lines += describe_slow_links(links, names, each, inside=inside)
    return lines


def rings(nodes: int, each: int, *, inside: bool) -> list[list[int]]:
    """The ranks of each ring: `inside` each node, or of all nodes for each local rank."""
    if inside:
        return [list(range(node * each, (node + 1) * each)) for node in range(nodes)]
    return [list(range(local, nodes * each, each)) for local in range(each)]


def _measure_links(rank: Rank, device: torch.device, of: list[list[int]]) -> dict[Link, float]:
    """GB/s of all links of the rings, known to all ranks."""
    ring = next(ring for ring in of if rank.number in ring)
    at = ring.index(rank.number)
    count = min(_LINK_BYTES, rank.plan["preflight"]["megabytes"] << 20) // 4
    own, reached = torch.ones(count, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_EXCHANGES):
        dist.barrier()
        reached[0] = max(float(reached), 2 * count * 4 / 1e9 / _exchange(own, ring[at - 1], ring[(at + 1) % len(ring)]))
    return join_links([float(piece) for piece in _all_gather(reached)], of)


def _exchange(own: torch.Tensor, *peers: int) -> float:
    """Seconds for both directions with both neighbours at once."""
    ways = [dist.P2POp(dist.isend, own, peer) for peer in peers]
    ways += [dist.P2POp(dist.irecv, torch.empty_like(own), peer) for peer in peers]
    began = now(own.device)
    for way in dist.batch_isend_irecv(ways):
        way.wait()
    return now(own.device) - began


def join_links(reached: Sequence[float], of: list[list[int]]) -> dict[Link, float]:
    """Each link once, with the speed of its faster end."""
    links: dict[Link, float] = {}
    for ring in of:
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            if (b, a) not in links:  # two ranks have one link
                links[a, b] = max(reached[a], reached[b])
    return links


def describe_slow_links(links: Mapping[Link, float], names: Sequence[str], each: int, *, inside: bool) -> list[str]:
    """Slow links between nodes: `n17 to n18: 0.4 GB/s, the others 20`. A node's slowest ring counts.

    In nodes: `n17: rank 131 to rank 132: 2 GB/s, the others 40`; others: the same pair on other nodes.
    """
    times = _SLOW_PAIRS if inside and len(names) < _FEWEST else _SLOW

    def kind(link: Link) -> object:
        """What the links have in common with which this one is compared."""
        if not inside:
            return "between nodes"
        return (link[0] % each, link[1] % each) if len(names) >= _FEWEST else link[0] // each

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
    return _describe(far)


def _describe(far: Mapping[tuple[str, str], tuple[float, float]]) -> list[str]:
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
    return [f"{who}: {gb_s:.2g} GB/s, the others {usual:.3g}" for who, (gb_s, usual) in speeds.items()][:_SHOWN_LINKS]
