"""The parts of a start and how each grows: constants measured here, predictions, and what was simulated beside them.

A constant is of CPU seconds, which a busy machine changes little. What a node or a rank does by itself runs at the same
time on all of them; what the first node does for each of the others runs one after another.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any

import plans
import rendezvous
from table import Row, fit

from dray.contract import node_start
from dray.runner.connections import Connection, StartTimes
from dray.runner.control import StartTimings

SIZES, RANKS = (64, 1024, 10_000), 8
_MEASURED = (64, 256, 1024)  # nodes by which the growth is known; the largest of SIZES is predicted
_MESHES = (8, 16, 32, 64)  # ranks in one process
_SIMULATED_RANKS = 256
_IMAGE_GB = 2.6
_PARTS = dict.fromkeys((node_start.STAGE, *node_start.RANK, node_start.CONTAINER, node_start.PREFLIGHT), 12.345)


def rows() -> list[Row]:
    """Of each part what is measured, and what its growth predicts for more nodes than that."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    found = [*_grow("planning", _plan, 1), *_stage(), *_each(), *_groups()]
    return [*found, *_grow("collecting the parts", _collect, 10), *_grow("rendezvous", _meet, 10)]


def _grow(name: str, measure: Callable[[int], float], aim: float) -> list[Row]:
    """Measured up to 1,024 nodes, predicted by that for 10,000, and simulated there too."""
    points = [(float(count), measure(count)) for count in _MEASURED]
    print(f"{name}: seconds = {fit(points)}", flush=True)
    found = [Row(name, count, took, "s") for count, took in ((int(count), took) for count, took in points)]
    most = SIZES[-1]
    found.append(Row(f"  {name}, predicted", most, _at(points, most), "s"))
    return [*found, Row(f"  {name}, simulated", most, measure(most), "s", aim)]


def _at(points: Sequence[tuple[float, float]], count: float) -> float:
    """By the line through the first point and the last, which is the longest of what was measured."""
    (first, low), (last, high) = points[0], points[-1]
    return low + (high - low) / (last - first) * (count - first)


def _plan(count: int) -> float:
    began = time.process_time()
    plans._plan(f"n[1-{count}]", count)
    return time.process_time() - began


def _meet(count: int) -> float:
    return rendezvous._meet(count, limit=300)[0]


def _stage() -> list[Row]:
    """Each node reads the image and hashes it; the shared disk sends it as often as there are nodes."""
    data = os.urandom(1 << 20)
    began, digest = time.process_time(), hashlib.sha256()
    for _ in range(256):
        digest.update(data)
    each = (time.process_time() - began) / (256 * len(data)) * 1e9
    hashed = [Row("image staged: hashing 2.6 GB, on each node", count, each * _IMAGE_GB, "s") for count in SIZES[:1]]
    return [*hashed, *(Row("  read from the shared disk by all", count, count * _IMAGE_GB, "GB") for count in SIZES)]


def _each() -> list[Row]:
    """What each node and each rank does by itself, however many there are."""
    runner = _child("import dray.runner.__main__")
    loaded = _child("import torch, transformers, accelerate, dray.train.__main__")
    return [Row("container: the runner's own start", 1, runner, "s"), Row("imports, of each rank", 1, loaded, "s")]


def _child(code: str) -> float:
    """CPU seconds of a Python that does this, the second time, when the disk has been read."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  our own text
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _groups() -> list[Row]:
    """gloo connects a rank with 2 log2 N others: real connections of ranks that are threads of this process."""
    points = [(log2(count), _mesh(count) / count) for count in _MESHES]
    print(f"process groups: CPU seconds of a rank = {fit(points)} (log2 of the ranks)", flush=True)
    found = [Row("process groups, of each rank", _MESHES[-1] // RANKS, points[-1][1], "s")]
    predicted = _at(points, log2(_SIMULATED_RANKS))
    found.append(Row(f"  predicted for {_SIMULATED_RANKS} ranks", _SIMULATED_RANKS // RANKS, predicted, "s"))
    took = _mesh(_SIMULATED_RANKS) / _SIMULATED_RANKS
    found.append(Row(f"  simulated for {_SIMULATED_RANKS} ranks", _SIMULATED_RANKS // RANKS, took, "s"))
    whole = _mesh(_MESHES[-1], lazy="0") / _MESHES[-1]
    found.append(Row("  and each with each", _MESHES[-1] // RANKS, whole, "s"))
    predictions = (
        Row("  predicted for 8 ranks a node", count, _at(points, log2(count * RANKS)), "s") for count in SIZES
    )
    return [*found, *predictions]


def _mesh(count: int, lazy: str = "1") -> float:
    """CPU seconds of all ranks, with their first barrier."""
    import torch.distributed as dist  # noqa: PLC0415  seconds, which no other simulation needs

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": lazy}
    store, limit, groups = dist.HashStore(), datetime.timedelta(minutes=5), dict[int, Any]()

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, count, limit)
        groups[rank].barrier().wait()

    began, ranks = time.process_time(), [threading.Thread(target=join, args=(rank,)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if len(groups) != count:
        sys.exit(f"{count} ranks did not connect")
    return time.process_time() - began


def _collect(count: int) -> float:
    """The first node's CPU seconds: from each node two messages over a proved connection, then the one file."""
    near, far = socket.socketpair()
    guest, host = Connection(near), Connection(far)
    with tempfile.TemporaryDirectory() as folder:
        first = StartTimings(rendezvous._plan(count, 1)._replace(folder=folder, scratch=folder))
        took = 0.0
        for node in range(1, count):
            for _ in range(2):
                guest.send(StartTimes(_PARTS))
                began = time.process_time()
                for (parts,) in host.receive():
                    first.nodes[node] = parts
                took += time.process_time() - began
        began = time.process_time()
        first.look(last=True)
        took += time.process_time() - began
        written = Path(folder, "startup.json").read_bytes()
        if count == SIZES[-1]:
            print(f"startup.json of {count:,} nodes has {len(written):,} bytes")
        if json.loads(written)["nodes"][1:] != [_PARTS] * (count - 1):
            sys.exit("startup.json does not hold what was told")
    near.close()
    far.close()
    return took
