"""`python -m dray.runner.stage PLAN.json <IMAGE >COPY`: copy the image from node to node, before the runner starts.

The first node reads the image once, and the others get it in a tree. All nodes take part; those whose output is no
file take no copy, and only wait for the others. Exit code 0: COPY is complete, as far as this node knows, and node.sh
checks its digest. Any other: node.sh copies the shared file.
"""

from __future__ import annotations

import hmac
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dray.contract import files, run_folder
from dray.contract.findings import DrayError
from dray.runner import address, channel, chunks, node, rendezvous, tree
from dray.runner.channel import BrokenError, Channel

_LIMIT_S = 900.0  # for all of it
_CONNECT_S = 10.0
_TRIES = 4  # without a chunk more


def main(path: str) -> int:
    """Return 0 once the copy is complete and all nodes are done."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    copy = os.dup(1)  # what anybody prints must not get into it
    os.dup2(2, 1)
    plan = files.parse_json(files.text(path, "the plan", own=True), "the plan", path)
    try:
        me = node.index(plan["world"], os.environ)
        key = hmac.digest(rendezvous.secret_of(plan["folder"]), b"dray stage", "sha256")
        return stage(plan, me, key, copy if stat.S_ISREG(os.fstat(copy).st_mode) else None)
    except (OSError, DrayError) as error:
        print(f"dray: the image was not copied from node to node: {error}", flush=True)
        return 1


def stage(plan: Mapping[str, Any], me: int, key: bytes, copy: int | None) -> int:
    """Copy the image as node `me` of the plan; return 1 if this node has no room for it, else 0."""
    size, deadline, full = os.fstat(0).st_size, time.monotonic() + _LIMIT_S, False
    if copy is not None:
        try:
            os.posix_fallocate(copy, 0, size)
        except OSError as error:
            print(f"dray: no room for the image on this node: {error.strerror}", flush=True)
            copy, full = None, True
    file = chunks.File(0 if copy is None else copy, size)
    if me == 0:
        _lead(plan, key, file, deadline, keep=copy is not None)
    else:
        _follow(plan, me, key, file if copy is not None else None, deadline)
    return int(full)


def _lead(plan: Mapping[str, Any], key: bytes, file: chunks.File, deadline: float, *, keep: bool) -> None:
    world = plan["world"]
    listener = address.listen({**world, "port": 0})
    own = str(listener.getsockname()[0])
    server = chunks.Server(own, key, file)
    served = tree.Tree(world, key, listener, (own, server.port))
    rendezvous.publish(plan, listener, run_folder.STAGE)
    serving = threading.Thread(target=served.serve, args=(deadline,))
    serving.start()
    try:
        chunks.read(0, file, keep=keep)
    finally:
        if file.here < file.count:
            file.end()
        served.read.set()
        serving.join()
    listener.close()


def _follow(plan: Mapping[str, Any], me: int, key: bytes, file: chunks.File | None, deadline: float) -> None:
    first = _join(plan, key)
    try:
        if file is None:
            first.send({"node": me, "port": 0})
        else:
            server = chunks.Server(first.line.getsockname()[0], key, file)
            first.send({"node": me, "port": server.port})
            try:
                _get(first, key, file, deadline)
            finally:
                if file.here < file.count:
                    file.end()
            first.send({"have": True})
    except OSError:
        if file is None or file.here < file.count:
            raise
    # This node hands on what it has until all are done, or the first node is gone: then others copy the shared file.
    with suppress(OSError):
        first.receive_one(deadline)
    first.close()


def _get(first: Channel, key: bytes, file: chunks.File, deadline: float) -> None:
    """Copy from the node that the first one names; from another if that is gone or sends changed bytes."""
    tries, before, told = 0, 0, time.monotonic()

    def came() -> None:
        nonlocal told
        if time.monotonic() > told + tree.NEWS_S:
            told = time.monotonic()
            with suppress(OSError):  # the node that hands on the chunks may still have all
                first.send({"here": file.here})

    while file.here < file.count:
        at = first.receive_one(min(deadline, time.monotonic() + chunks.STALLED_S)).get("at")
        if not isinstance(at, list) or len(at) != 2:
            raise BrokenError("the first node named no node to copy from")
        try:
            peer = _connect((str(at[0]), int(at[1])), key, channel.PROOF_S)
            try:
                chunks.fetch(peer, file, deadline, came)
            finally:
                peer.close()
        except chunks.StalledError:
            raise
        except OSError as error:
            tries = 1 if file.here > before else tries + 1
            if tries >= _TRIES or file.here == file.count:
                raise
            print(f"dray: chunk {file.here} did not come from {at[0]}: {error}; asking another node", flush=True)
            before = file.here
            first.send({"lost": True})


def _join(plan: Mapping[str, Any], key: bytes) -> Channel:
    """The connection to the first node."""
    nodes, pause, refused = len(plan["world"]["nodes"]), 0.05, 0
    deadline = time.monotonic() + tree.START_S
    time.sleep(rendezvous.first_wait(nodes))
    while time.monotonic() < deadline:
        if at := rendezvous.published(plan, run_folder.STAGE):
            try:
                return _connect(at, key, channel.proof_s(nodes))
            except ConnectionRefusedError as error:  # it listens before it says so: then it has ended
                refused += 1
                if refused == _TRIES:
                    raise BrokenError("the first node has ended") from error
            except OSError as error:
                print(f"dray: the first node at {at[0]} port {at[1]}: {error}", flush=True)
        time.sleep(rendezvous.jittered(pause))
        pause = rendezvous.longer(pause, nodes)
    raise BrokenError(f"the first node could not be reached in {tree.START_S:.0f} s")


def _connect(at: tuple[str, int], key: bytes, seconds: float) -> Channel:
    line = socket.create_connection(at, timeout=_CONNECT_S)
    try:
        return channel.greet(line, key, time.monotonic() + seconds)
    except OSError:
        line.close()
        raise


if __name__ == "__main__":
    ended = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(ended)  # threads that hand on what nobody wants any more
