"""Whether all ranks are in one process group, by what torch leaves in the store; the ranks notice nothing.

torch counts in the store each rank that joins it with a world size. In a process group with Gloo, which
`init_process_group()` without a backend makes too, each rank also leaves its address under its number. A rank that
works alone, or with a store of its own, leaves neither. Each node sees which of its ranks are connected to the store.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dray.contract import files, run_folder
from dray.runner.children import below
from dray.runner.heartbeats import program

_FIRST_S, _LONGEST_S = 1.0, 60.0  # between two looks; the time doubles with each
_ESTABLISHED = "01"
_ANSWER_S = 5.0
# Of the store's protocol, seen the same in torch 2.8, 2.9 and 2.13: TCPStoreBackend.hpp.
_VALIDATE, _GET, _CHECK = 0, 3, 5
_MAGIC = 0x3C85F7CE
_READY = 0
_COUNT, _ADDRESS = "init/", "/default_pg/0//cpu//0/{}"


class Joined:
    """The ranks that were seen with a connection to the store; on the first node, those of all nodes."""

    def __init__(self, plan: Mapping[str, Any], me: int, port: int) -> None:
        each = plan["world"]["ranks_per_node"]
        self.ranks: set[int] = set()
        self._size, self._scratch, self._port = plan["world"]["size"], plan["scratch"], port
        self._unseen = {*range(me * each, (me + 1) * each)}
        self._wait, self._next = _FIRST_S, time.monotonic() + _FIRST_S

    def look(self) -> None:
        """Look at this node's ranks, often at first."""
        if not self._unseen or time.monotonic() < self._next:
            return
        self._wait = min(2 * self._wait, _LONGEST_S)
        self._next = time.monotonic() + self._wait
        if connections := _connections(self._port):
            seen = {rank for rank in self._unseen if _holds(program(self._scratch, rank), connections)}
            self.ranks |= seen
            self._unseen -= seen

    def record(self, folder: str, store: tuple[str, int]) -> None:
        """Write a file if the process group is smaller than the world."""
        if self._size == 1:
            return
        try:
            came, largest = _counted(store, self._size)
            if not 0 < largest < self._size:
                return
            absent = [*range(self._size)] if came == len(self.ranks) < self._size else []
            told = {"largest": largest, "absent": [rank for rank in absent if rank not in self.ranks]}
            files.write_atomic(f"{folder}/{run_folder.PROCESS_GROUP}", json.dumps(told))
        except (OSError, ValueError, struct.error):  # no store that answers as torch's does: nobody can tell
            return


def _connections(port: int) -> set[str]:
    """The sockets on this node that are connected to this port, as links in /proc name them."""
    found = set()
    for family in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{family}", encoding="ascii") as file:
                lines = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        ours = f":{port:04X}"
        found |= {f"socket:[{line[9]}]" for line in lines if line[2].endswith(ours) and line[3] == _ESTABLISHED}
    return found


def _holds(process: int, connections: set[str]) -> bool:
    """Whether the process, or one that it has started, has one of these connections."""
    return process > 0 and (
        bool(connections & {*_files(process)}) or any(_holds(one, connections) for one in below(process))
    )


def _files(process: int) -> Iterable[str]:
    folder = f"/proc/{process}/fd"
    try:
        return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
    except OSError:  # it has ended, or closed one meanwhile
        return []


def _counted(store: tuple[str, int], size: int) -> tuple[int, int]:
    """How many ranks joined the store, and how many the largest process group has, as far as the store tells."""
    with socket.create_connection(store, timeout=_ANSWER_S) as line:
        line.sendall(struct.pack("=BI", _VALIDATE, _MAGIC))
        counted, *addresses = _check(line, [_COUNT, *map(_ADDRESS.format, range(size))])
        if not counted:
            return 0, 0
        line.sendall(struct.pack("=B", _GET) + _text(_COUNT))
        (length,) = struct.unpack("=Q", _read(line, 8))
        came = int(_read(line, min(length, 20)))
        return came, sum(addresses) or came


def _check(line: socket.socket, keys: Sequence[str]) -> list[bool]:
    line.sendall(b"".join(struct.pack("=BQ", _CHECK, 1) + _text(key) for key in keys))
    return [answer == _READY for answer in _read(line, len(keys))]


def _text(text: str) -> bytes:
    return struct.pack("=Q", len(text)) + text.encode()


def _read(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = line.recv(size - len(found))
        if not part:
            raise OSError("the store has ended")
        found += part
    return found
