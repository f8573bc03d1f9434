"""The process groups of a run, and JSON between its ranks. Nothing that comes from another rank is unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from dray.contract import failures, findings
from dray.contract.findings import DrayError, UnfitError
from dray.contract.heartbeat import GROUPS
from dray.contract.processes import unprinted
from dray.train import ranks
from dray.train.runtime.heartbeat import heartbeat

# Of collectives in a training step, as NCCL's default; and of all others.
_STEP_TIMEOUT, _CONTROL_TIMEOUT = timedelta(minutes=10), timedelta(days=7)

# benchmarks/gpu sets it to gloo: NCCL refuses two ranks on one GPU.
_BACKEND = "DRAY_BACKEND"

_control: dist.ProcessGroup | None = None


def init_distributed(variant: str) -> torch.device:
    """Join the other ranks; return this rank's device.

    Tokenizing, reading weights and writing checkpoints may take longer than the 10 minutes of a step's collectives. So
    they use a second group, the control group: gloo on CPUs, whose timeout is 7 days once all ranks are connected.
    """
    global _control  # noqa: PLW0603  torch's default group is a global, too
    on_cpu = variant == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", ranks.local_rank())
    if not on_cpu:
        torch.cuda.set_device(device)
    try:
        # With its device NCCL connects now, not in the first collective, and splits later groups from this one.
        backend = "gloo" if on_cpu else os.environ.get(_BACKEND, "nccl")
        dist.init_process_group(backend, timeout=_STEP_TIMEOUT, device_id=device if backend == "nccl" else None)
        with unprinted():  # torch 2.9 prints a line for each rank and group, with the ranks that are not connected
            _control = dist.new_group(backend="gloo", timeout=_STEP_TIMEOUT)
        # With TORCH_GLOO_LAZY_INIT two ranks connect when they first exchange data. The barrier connects, within the
        # group's timeout, all pairs that a later broadcast, all-gather or all-reduce uses.
        dist.barrier(group=_control)
    except RuntimeError as error:  # all errors of torch.distributed are of this class
        raise UnfitError(
            "the ranks could not connect to one another",
            wanted=f"connections between all ranks within {_STEP_TIMEOUT.total_seconds():.0f} s",
            found=f"{str(error).strip().splitlines()[0]}\n"
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '(not set)')}",
            fix="correct `interfaces` in the site's file, or set env.GLOO_SOCKET_IFNAME in the recipe",
        ) from error
    assert _control is not None
    _set_pg_timeout(_CONTROL_TIMEOUT, _control)
    heartbeat.lap(GROUPS)
    return device


def control_group() -> dist.ProcessGroup | None:
    """The process group for everything except training steps; None before `init_distributed`."""
    return _control


def barrier() -> None:
    """Wait for all ranks, for as long as it takes."""
    if _control is not None:
        dist.barrier(group=_control)


def all_gather_json(value: Any) -> list[Any]:  # noqa: ANN401  any JSON value
    """Return the values of all ranks, by rank."""
    if _control is None:
        return [value]
    data = _encoded(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=_control)
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))), group=_control)
    return [_decoded(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_json(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """Return the value of rank 0."""
    if _control is None:
        return value
    data = _encoded(value if ranks.rank() == 0 else None)
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0, group=_control)
    if ranks.rank():
        data = torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=_control)
    return _decoded(data)


def on_all(
    do: Callable[[], Any],
    join: Callable[[Any, Any], Any],
    then: Callable[[Any], Any] = lambda value: value,
) -> Any:  # noqa: ANN401  what `then` returns
    """Run `do` on all ranks, tree-reduce its values with `join`, run `then` on rank 0, and broadcast the result.

    A rank receives from at most log2 N others. Where `do` fails on one rank, all raise the same error.
    """
    rank, world = ranks.rank(), ranks.world()
    result, step = _tried(do), 1
    while step < world and not rank & step:  # `result` is of `step` ranks: this one and those after it
        if rank + step < world:
            other = _receive(rank + step)
            if "value" in result:
                result = {"value": join(result["value"], other["value"])} if "value" in other else other
        step *= 2
    if rank:
        _send(result, rank - step)
    elif "value" in result:
        value = result["value"]
        result = _tried(lambda: then(value))
    return _value_or_raise(broadcast_json(result))


def on_rank_0(do: Callable[[], Any]) -> Any:  # noqa: ANN401  what `do` returns
    """Run `do` on rank 0 and broadcast its result: another node may see an older state of a shared folder."""
    return _value_or_raise(broadcast_json(_tried(do) if ranks.rank() == 0 else None))


def _tried(do: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": do()}
    except (DrayError, OSError) as error:
        return {"finding": failures.unexpected_error(error, log=True).finding._asdict()}


def _value_or_raise(result: dict[str, Any]) -> Any:  # noqa: ANN401  any JSON value
    if "finding" in result:
        raise findings.error(result["finding"])
    return result["value"]


def _send(value: Any, rank: int) -> None:  # noqa: ANN401  any JSON value
    data = _encoded(value)
    for tensor in (torch.tensor([len(data)]), data):
        _wait(dist.isend(tensor, rank, group=_control))


def _receive(rank: int) -> Any:  # noqa: ANN401  any JSON value
    size = torch.zeros(1, dtype=torch.int64)
    _wait(dist.irecv(size, rank, group=_control))
    data = torch.zeros(int(size), dtype=torch.uint8)
    _wait(dist.irecv(data, rank, group=_control))
    return _decoded(data)


def _wait(work: dist.Work | None) -> None:
    """For send and recv gloo uses the timeout at the group's creation, not the one set later; so pass it."""
    assert work is not None
    work.wait(_CONTROL_TIMEOUT)


def _encoded(value: Any) -> torch.Tensor:  # noqa: ANN401  any JSON value
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(data: torch.Tensor) -> Any:  # noqa: ANN401  any JSON value
    return json.loads(bytes(data.numpy()))
