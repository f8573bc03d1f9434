"""The preflight's collectives: all-reduce and all-gather of all ranks, their results, bandwidth and transport."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dray.checks import links, transport
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
    pieces = links.all_gather(_pattern(rank.number, length).to(device))
    wrong = [number for number, piece in enumerate(pieces) if not torch.equal(piece, _pattern(number, length))]
    _require_right_data(rank, _all_gather_json(wrong[:_MOST_WRONG], device))
    rank.phase("control group")
    with unprinted():  # as the trainer has one beside NCCL's
        control = dist.new_group(backend="gloo")
    _require_right_sum(rank, torch.full((1,), rank.number), "gloo's all-reduce", control)
    slow_links = links.find_slow(rank, device)
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


def _all_gather_json(value: object, device: torch.device) -> list[Any]:
    """Every rank's value, which is short: torch's own for objects unpickles what others send."""
    content = json.dumps(value).encode().ljust(_JSON)
    pieces = links.all_gather(torch.tensor(list(content), dtype=torch.uint8, device=device))
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
