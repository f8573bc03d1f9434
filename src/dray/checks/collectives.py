"""What the ranks do together before a launch: do they hear one another, right, and how fast, over which wire?"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dray.checks import declared, drivers, transport
from dray.checks.rank import Rank, Wrong
from dray.checks.result import Skip, Unfit

_GROUPS = 5
_ROUNDS = 3
_PATTERN, _ALL = 1 << 16, 1 << 24  # numbers of a rank, and at most so many of all, which each holds
_FLOOR_NODES = 8  # beyond, messages of this size wait for one another, and no longer for the wire
_SUSPECT = "leave that node out (sbatch --exclude), and tell the cluster's administrators"


def suite(rank: Rank, log: Path) -> dict[str, Any]:
    """Every part in turn; what was seen, or Wrong."""
    rank.phase("device")
    device = _device(rank)
    rank.phase("meet")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank.deadline(rank.plan["preflight"]["within"])
    rank.phase("all-reduce")
    total = torch.full((1,), rank.number, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    if total.item() != sum(range(rank.size)):
        raise Wrong(
            "a sum over all ranks is wrong", wanted=str(sum(range(rank.size))), found=str(total.item()), fix=_SUSPECT
        )
    rank.phase("all-gather")
    length = min(_PATTERN, _ALL // rank.size)
    mine = _pattern(rank.number, length).to(device)
    pieces = [torch.empty_like(mine) for _ in range(rank.size)]
    dist.all_gather(pieces, mine)
    wrong = (number for number, piece in enumerate(pieces) if not torch.equal(piece.cpu(), _pattern(number, length)))
    _right(rank, [*wrong])
    rank.phase("new groups")
    for _ in range(_GROUPS):
        group = dist.new_group(list(range(rank.size)))
        dist.all_reduce(torch.ones(1, device=device), group=group)
        dist.destroy_process_group(group)
    rank.phase("bandwidth")
    sweep = _sweep(rank, device)
    wire = transport.used(log.read_text(errors="replace").splitlines()) if log.exists() else None
    _hold(rank, wire, max((row["bus_gb_s"] for row in sweep), default=0.0), gpus=device.type == "cuda")
    said: list[Any] = [None] * rank.size
    wired = wire.name if wire else "gloo over TCP" if device.type == "cpu" else "within the node"
    dist.all_gather_object(said, {"node": rank.node_of(rank.number), "wire": wired})
    if device.type == "cuda":  # NCCL may still be sending when its kernel has ended
        dist.destroy_process_group()
    rank.phase("done")
    return {"seconds": rank.seconds, "sweep": sweep, "ranks": said}


def _device(rank: Rank) -> torch.device:
    if rank.plan["variant"] == "cpu":
        return torch.device("cpu")
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if count <= local:
        raise Wrong(
            f"node {rank.node_of(rank.number)} has too few GPUs",
            wanted=f"{rank.plan['world']['ranks_per_node']}, one for each rank",
            found=f"torch sees {count}{_why_none(rank)}",
            fix="python -m dray.checks in the image says why; ask for GPUs (--gpus-per-node), or leave this node out",
        )
    torch.cuda.set_device(local)
    torch.ones(8, device="cuda").sum().item()
    return torch.device("cuda", local)


def _right(rank: Rank, bad: list[int]) -> None:
    """Whose data came in wrong, and at whom: a rank in most of these pairs is to blame, as sender or as receiver."""
    reports: list[Any] = [None] * rank.size
    dist.all_gather_object(reports, bad)
    pairs = {frozenset((sender, receiver)) for receiver, senders in enumerate(reports) for sender in senders}
    if not pairs:
        return
    count = {number: sum(number in pair for pair in pairs) for pair in pairs for number in pair}
    guilty = [number for number in sorted(count) if count[number] == max(count.values())]
    raise Wrong(
        f"data of {' or '.join(f'rank {one} on {rank.node_of(one)}' for one in guilty[:4])} came in wrong",
        wanted="what each rank is known to send",
        found=f"other bytes, between {len(pairs)} pairs of ranks",
        fix=_SUSPECT,
        node=rank.node_of(guilty[0]),
        rank=guilty[0],
    )


def _why_none(rank: Rank) -> str:
    try:
        if rank.plan["variant"] == "rocm":
            drivers.explain_amd()
        else:
            drivers.explain_nvidia(declared.read().driver)
    except (Skip, Unfit) as said:
        return f": {said}"
    return ""


def _pattern(rank: int, length: int) -> torch.Tensor:
    return (torch.arange(length, dtype=torch.int64) * 2654435761 + rank * 40503) % 1000003


def _sweep(rank: Rank, device: torch.device) -> list[dict[str, float]]:
    """Bus bandwidth: what each link carries, by the measure of nccl-tests."""
    rows = []
    size = 1 << 14
    while size <= rank.plan["preflight"]["megabytes"] << 20:
        values = torch.zeros(size // 4, device=device)
        dist.all_reduce(values)  # what is set up once for a size is not counted
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = (time.perf_counter() - began) / _ROUNDS
        rows.append({"bytes": size, "bus_gb_s": round(2 * (rank.size - 1) / rank.size * size / took / 1e9, 3)})
        size <<= 4
    return rows


def _hold(rank: Rank, wire: transport.Wire | None, best: float, *, gpus: bool) -> None:
    """Hold what was seen against what the site expects of its fabric."""
    fabric, nodes = rank.plan["fabric"], rank.plan["world"]["nodes"]
    where = f"rank {rank.number} on {rank.node_of(rank.number)}"
    if gpus and len(nodes) > 1 and fabric["transport"]:
        expected = " or ".join(fabric["transport"])
        if wire is None or wire.name.casefold() not in {name.casefold() for name in fabric["transport"]}:
            raise Wrong(
                f"{where} does not use the fast network",
                wanted=f"{expected} ({rank.plan['site']})",
                found=f"{wire.name}: {wire.trouble or wire.line}" if wire else "NCCL's log names no network",
                fix=(wire and wire.fix) or "see preflight/nccl-*.log in the run's folder; docs/fabric.md",
                node=rank.node_of(rank.number),
                rank=rank.number,
            )
    if 1 < len(nodes) <= _FLOOR_NODES and best < fabric["min_bus_bandwidth_gb_s"]:
        raise Wrong(
            "the nodes hear one another more slowly than this cluster can",
            wanted=f"{fabric['min_bus_bandwidth_gb_s']} GB/s of bus bandwidth at least ({rank.plan['site']})",
            found=f"{best} GB/s",
            fix="see preflight/nccl-*.log; a slower network may be in use. preflight.when=never leaves this out",
        )
