"""The image from node to node: as many processes of the real program as nodes, and a cap on what each may send."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from table import Row, line

from dray.runner import chunks, stage

SIZES = (4, 8, 16, 32, 64)
CHUNK, CHUNKS = 128 << 10, 4
SECONDS = 0.5  # that a node's link needs for a chunk
FREE = 256 << 20  # bytes that go over one link without a cap
_PIECES = 8
_IMAGE = 2_600_000_000  # bytes
_LINK = 1.25e9  # bytes a second: 10 Gbit/s


def rows() -> list[Row]:
    """Seconds from the first node's start to the last node's end; how much of the shared file is read."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    found, points = [], []
    for count in SIZES:
        took, read = _tree(count, CHUNK * CHUNKS, SECONDS)
        points.append((math.log2(count), took))
        found.append(Row("staging", count, took, "s"))
        found.append(Row("  read of the shared file", count, read, "times", 1.0))
    start, slope, r2 = line(points)
    print(f"seconds = {start:.3g} + {slope:.3g} log2 N, R2 = {r2:.4f}")
    print(f"the model: {2 * CHUNKS * SECONDS:.3g} s + at most {2 * SECONDS:.3g} s a level, as each chunk is sent twice")
    found.append(Row("staging: 1 - R2 of a + b log2 N", SIZES[-1], 1 - r2, "", 0.05))
    before = _cpu()
    took, _ = _tree(2, FREE, 0)
    cpu = (_cpu() - before) / 2
    print(f"two nodes without a cap: {FREE / took / 1e6:.0f} MB/s; {cpu / FREE * 1e9:.2f} s of CPU a node and GB")
    rate, check = min(_LINK / 2, FREE / cpu), _digest()
    print(f"sha256 of the copy: {check * 1e9:.2f} s a GB")
    for count in (64, 1024, 10_000):
        seconds = (_IMAGE + chunks.CHUNK * math.log2(count)) / rate + _IMAGE * check
        found.append(Row("  predicted: 2.6 GB over 10 Gbit/s", count, seconds, "s"))
    return found


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _digest() -> float:
    """Seconds of a core for a byte."""
    data, begun = bytes(FREE // 4), time.process_time()
    hashlib.sha256(data).digest()
    return (time.process_time() - begun) / len(data)


def _tree(count: int, size: int, seconds: float) -> tuple[float, float]:
    """Seconds; bytes that are read of the shared file, in files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:  # memory: disks are not what is measured
        folder = Path(name)
        _write(folder, count, size)
        gate, opened = os.pipe()
        told, tell = os.pipe()
        begun = time.perf_counter()
        nodes = {_fork(folder, number, count, seconds, (gate, tell, opened)): number for number in range(count)}
        os.close(gate)
        os.close(tell)
        with os.fdopen(told) as lines:
            for _ in range(count):
                lines.readline()
            begun = time.perf_counter()
            os.close(opened)
            read = sum(int(lines.readline() or sys.exit("a node has ended before its time")) for _ in range(count))
            took = time.perf_counter() - begun
        for process, number in nodes.items():
            whole = os.waitpid(process, 0)[1] == 0
            if not whole or (folder / f"copy-{number}").read_bytes() != (folder / "image").read_bytes():
                sys.exit(f"node {number} of {count} has no copy")
    return took, read / size


def _write(folder: Path, count: int, size: int) -> None:
    (folder / "image").write_bytes(os.urandom(size))
    (folder / "secret").write_text("5ec2e7" * 8)
    world = {
        "nodes": [{"name": f"n{number}", "address": "127.0.0.1"} for number in range(count)],
        "identity": {"node": "NODE", "nodes": "NODES", "name": "NAME"},
        "master": "127.0.0.1", "port": 0, "interfaces": [], "shared_folder": True,
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps({"folder": str(folder), "attempt": 1, "world": world}))


def _fork(folder: Path, number: int, count: int, seconds: float, pipes: tuple[int, int, int]) -> int:
    """A process of its own for a node, which need not load what this one has."""
    if process := os.fork():
        return process
    ended, (gate, tell, opened) = 1, pipes
    try:
        os.close(opened)
        os.environ |= {"NODE": str(number), "NODES": str(count), "NAME": f"n{number}"}
        ended = _node(folder, number, seconds, gate, tell)
    finally:
        os._exit(ended)


def _node(folder: Path, number: int, seconds: float, gate: int, tell: int) -> int:
    """The program, whose link takes its time. It tells when it is there, and how much it has read."""
    whole, send, alone, read = chunks.read, chunks.push, threading.Lock(), 0

    def counted(source: int, file: chunks.File, *, keep: bool) -> None:
        nonlocal read
        whole(source, file, keep=keep)
        read += file.size

    def capped(line: socket.socket, file: int, at: int, length: int) -> None:
        piece = -(-length // _PIECES)
        for begin in range(at, at + length, piece):
            with alone:  # all whom it serves share its link
                time.sleep(seconds / _PIECES)
            send(line, file, begin, min(piece, at + length - begin))

    chunks.read = counted
    if seconds:
        chunks.CHUNK, chunks.push = CHUNK, capped
    os.write(tell, b"ready\n")
    os.read(gate, 1)
    os.dup2(os.open(folder / "image", os.O_RDONLY), 0)
    os.dup2(os.open(folder / f"copy-{number}", os.O_RDWR | os.O_CREAT, 0o600), 1)
    ended = stage.main(str(folder / "plan.json"))
    os.write(tell, f"{read}\n".encode())
    return ended
