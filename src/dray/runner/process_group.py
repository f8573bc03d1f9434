"""Whether all ranks are in one process group, by what torch leaves in the store; the ranks notice nothing.

torch counts in the store each rank that joins it with a world size. In a process group with Gloo, which
`init_process_group()` without a backend makes too, each rank also leaves its address under its number. A rank that
works alone, or with a store of its own, leaves neither.
"""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress

from dray.contract import run_folder
from dray.runner import failure_record as records
from dray.runner.plan import Endpoint

_ANSWER_S = 5.0
# Of the store's protocol, seen the same in torch 2.8, 2.9 and 2.13: TCPStoreBackend.hpp.
_VALIDATE, _GET, _CHECK = struct.pack("=BI", 0, 0x3C85F7CE), struct.pack("=B", 3), struct.pack("=BQ", 5, 1)
_READY = 0
_COUNT, _ADDRESS = "init/", "/default_pg/0//cpu//0/{}"


def record(folder: str, size: int, store: Endpoint) -> None:
    """Write a file if some ranks have joined a process group, and the largest one is smaller than the world."""
    if size == 1:
        return
    keys = [_COUNT, *map(_ADDRESS.format, range(size))]
    with (
        suppress(OSError, ValueError, struct.error),  # no store that answers as torch's does: nobody can tell
        socket.create_connection(store, timeout=_ANSWER_S) as line,
        line.makefile("rb") as answers,
    ):
        line.sendall(_VALIDATE + b"".join(_CHECK + _text(key) for key in keys))
        counted, *addresses = (answer == _READY for answer in answers.read(len(keys)))
        if not counted:
            return
        line.sendall(_GET + _text(_COUNT))
        (length,) = struct.unpack("=Q", answers.read(8))
        # A store that has died leaves its port to others, who may tell any length.
        largest = sum(addresses) or int(answers.read(min(length, 20)))
        if largest < size:
            records.put(f"{folder}/{run_folder.PROCESS_GROUP}", json.dumps({"largest": largest}))


def _text(text: str) -> bytes:
    return struct.pack("=Q", len(text)) + text.encode()
