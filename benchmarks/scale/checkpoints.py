"""Checkpoints of many ranks, which are threads here: dray's own code, real files, and what rank 0 hears of others."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from table import Row, fit, line

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from dray.train.checkpoint.checkpoints import Checkpoints
from ranks import Sharded, World, checkpoints

SIZES = (2, 64, 512)
PREDICTED = (8_192, 80_000)
MORE = 8  # files beside one for each rank
LAYERS, MEGABYTES = 24, 128
KINDS = ("weights", "exp_avg", "exp_avg_sq")
_MEMORY = Path("/dev/shm")  # noqa: S108  a disk takes minutes to bring all of them to it


def rows() -> list[Row]:
    """Files, what rank 0 hears, and seconds of all ranks on this machine's cores, which a run's ranks do not share."""
    torch.set_num_threads(1)  # ranks are threads already
    found, messages, texts = [], [], []
    for count in SIZES:
        one = _checkpoint(count)
        levels = math.log2(count)
        messages.append((levels, one["messages"]))
        texts.append((count, one["bytes"] / 1e6))
        found += [
            Row("checkpoint: files", count, one["files"], "files", count + MORE + 0.5),
            Row("  messages that rank 0 hears", count, one["messages"], "", 4 * levels + 0.5),
            Row("  the most that any rank hears", count, one["most"], "", 4 * (levels + 1) + 0.5),
            Row("  bytes of those of rank 0", count, one["bytes"] / 1e6, "MB"),
            Row("  bytes of the manifest", count, one["manifest"] / 1e6, "MB"),
            Row("  save", count, one["save"], "s"),
            Row("  verify", count, one["verify"], "s"),
            Row("  messages that rank 0 hears of it", count, one["outcome"], "", 2 * levels + 0.5),
            Row("  restore after it", count, one["restore"], "s"),
        ]
    start, slope, r2 = line(messages)
    print(f"messages that rank 0 hears = {start:.3g} + {slope:.3g} log2 N, R2 = {r2:.4f}")
    print(f"MB that rank 0 hears = {fit(texts)}")
    first, each, _ = line(texts)
    for count in PREDICTED:
        found.append(Row("  predicted: messages of rank 0", count, start + slope * math.ceil(math.log2(count)), ""))
        found.append(Row("  predicted: bytes of rank 0", count, first + each * count, "MB"))
    return found


def _checkpoint(count: int) -> dict[str, float]:
    """Of one size of a run: saved, verified and read by as many ranks."""
    numbers = MEGABYTES * 1_000_000 // 4
    shapes = {
        f"{kind}.layer.{layer}": (numbers // (LAYERS * len(KINDS) * 8), 8) for kind in KINDS for layer in range(LAYERS)
    }
    held = [Sharded(shapes, rank, count) for rank in range(count)]
    place = TemporaryDirectory(prefix="dray-checkpoints-", dir=_MEMORY if _MEMORY.is_dir() else None)
    with place as folder:
        world = World(count)
        save = _timed(world, lambda rank: _save(checkpoints(Path(folder), held[rank])))
        path = Path(folder) / "step-1"
        files = [*path.iterdir()]
        verify, whole = [0.0] * count, Checkpoints._verify

        def timed(own: Checkpoints, path: Path) -> tuple[dict[str, Any], list[str]]:
            began = time.perf_counter()
            found = whole(own, path)
            verify[own.rank] = time.perf_counter() - began
            return found

        with mock.patch.object(Checkpoints, "_verify", timed):
            both = _timed(readers := World(count), lambda rank: _resume(checkpoints(Path(folder), held[rank])))
        if not all(one.is_read() for one in held):
            raise AssertionError("the ranks read something else than they wrote")
        manifest = (path / "manifest.json").stat().st_size
        shutil.rmtree(path)
    return {
        "files": len(files), "manifest": manifest, "save": save, "verify": max(verify), "restore": both - max(verify),
        "outcome": len(readers.heard[0]),
        "messages": len(world.heard[0]), "bytes": sum(world.heard[0]), "most": max(map(len, world.heard)),
    }  # fmt: skip


def _timed(world: World, do: Callable[[int], None]) -> float:
    began = time.perf_counter()
    if failed := [one for one in world.each(do) if one is not None]:
        raise failed[0]
    return time.perf_counter() - began


def _save(own: Checkpoints) -> None:
    own.save(1, None)
    own.settle()


def _resume(own: Checkpoints) -> None:
    own.find()
    own.resume()
    if own.newest != 1:
        raise AssertionError("the checkpoint was not read")
