"""Thousands of nodes meet: the first node's own code in one process, all others as coroutines in another."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import random
import resource
import subprocess
import sys
import time
from typing import Any

from table import Row, fit

from dray.contract.findings import DrayError
from dray.runner import address, channel, host, introduction
from dray.runner import rendezvous as meeting

KEY = b"5ec2e7" * 8
SIZES = (2, 64, 1024, 10_000)
STRANGERS = 400
_MIB = 1024  # ru_maxrss counts KiB


def rows() -> list[Row]:
    """Seconds from the first connection to the last answer, and the first node's memory."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    found, points = [], []
    for count in SIZES:
        took, told = _meet(count)
        points.append((float(count), took))
        found.append(Row("rendezvous", count, took, "s", 10))
        found.append(Row("  first node's memory", count, told["mib"], "MiB", 200))
        found.append(Row("  first node's CPU", count, told["cpu"], "s", 10))
    print(f"seconds = {fit(points)}")
    many = SIZES[-1]
    took, told = _meet(many, strangers=STRANGERS)
    found.append(Row(f"rendezvous, {STRANGERS} strangers", many, took, "s", 10))
    found.append(Row("  first node's memory", many, told["mib"], "MiB", 200))
    _, told = _meet(many, absent=many // 2, limit=30)
    print(f"one unreachable: {told['said']}")
    if "missing: n5000\n" not in f"{told['said']}\n":
        sys.exit("the one that is missing is not named")
    return found


def _plan(count: int, limit: float) -> dict[str, Any]:
    nodes = [{"name": f"n{number}", "address": "127.0.0.1"} for number in range(count)]
    world = {"nodes": nodes, "master": "127.0.0.1", "port": 0, "interfaces": [], "rendezvous_timeout_s": limit}
    world |= {"one_machine": True, "shared_folder": True, "identity": {"image": "DRAY_IMAGE_ID"}}
    return {"folder": "/nonexistent", "attempt": 1, "preflight": None, "world": world}


def _meet(count: int, *, strangers: int = 0, absent: int = 0, limit: float = 60) -> tuple[float, dict[str, Any]]:
    server = [sys.executable, __file__, str(count), str(limit / 2)]
    with subprocess.Popen(server, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as first:  # noqa: S603
        assert first.stdout
        assert first.stdin
        port = int(first.stdout.readline())
        come = _come(port, count, strangers=strangers, absent=absent)
        try:
            took = asyncio.run(asyncio.wait_for(come, limit))
        except TimeoutError:
            first.kill()
            sys.exit(f"{count} nodes did not meet in {limit} s")
        first.stdin.close()
        return took, json.loads(first.stdout.readline())


async def _come(port: int, count: int, *, strangers: int, absent: int) -> float:
    hello = introduction.introduction(_plan(count, 1), 0, "digest")
    over = asyncio.Event()
    crowd = [asyncio.create_task(_stranger(port, number, over)) for number in range(strangers)]
    begun = time.perf_counter()
    come = [_node(port, number, count, hello) for number in range(1, count)]
    kinds = await asyncio.gather(*(one for number, one in enumerate(come, 1) if number != absent or one.close()))
    took = time.perf_counter() - begun
    over.set()
    await asyncio.gather(*crowd)
    if {*kinds} != {"refused" if absent else "go"}:
        sys.exit(f"nodes were told {sorted({*kinds})}")
    return took


async def _node(port: int, number: int, count: int, hello: dict[str, Any]) -> str:
    hello = {**hello, "node": number, "name": f"n{number}", "runner": f"{number:016x}", "time": time.time()}
    await asyncio.sleep(meeting.first_wait(count))
    reader, writer = await _greeted(port, number, hello)
    line = await reader.readline()
    writer.transport.abort()
    return next(iter(json.loads(line[64:])))


async def _greeted(port: int, number: int, hello: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As `rendezvous.join`: whom the first node has no room for comes again."""
    pause = 0.05
    while True:
        try:
            return await _greet(port, number, hello)
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311  no secret
            pause = meeting.longer(pause, SIZES[-1])


async def _greet(port: int, number: int, hello: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As `channel.greet`, and the introduction."""
    source = (f"127.0.0.{2 + number % 8}", 0)  # one address has too few ports for all
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source)
    theirs, own = await reader.readexactly(channel.NONCE), os.urandom(channel.NONCE)
    writer.write(own + channel._proof(KEY, b"guest", theirs, own))
    if not hmac.compare_digest(await reader.readexactly(32), channel._proof(KEY, b"host", own, theirs)):
        sys.exit("the first node does not hold the secret")
    text, key = json.dumps({**hello, "time": time.time()}).encode(), channel._proof(KEY, b"key", theirs, own)
    proof = channel._proof(key, b"guest", bytes(8), text)
    writer.write(proof.hex().encode() + text + b"\n")
    return reader, writer


async def _stranger(port: int, number: int, over: asyncio.Event) -> None:
    """Silent, a byte a second, half a message, a wrong proof, or rubbish without an end; again once it is shown out."""
    rubbish = (b"", b"x", b"x" * 40, os.urandom(channel.GREETING), bytes(100_000))[number % 5]
    while not over.is_set():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.10", 0))
            while not over.is_set():
                writer.write(rubbish)
                await writer.drain()
                await asyncio.sleep(1)
            writer.transport.abort()
        except OSError:
            await asyncio.sleep(0.2)


def _first(count: int, limit: float) -> None:
    """The process that is the first node."""
    plan = _plan(count, limit)
    listener, told = address.listen(plan["world"]), {}
    print(listener.getsockname()[1], flush=True)
    own = introduction.introduction(plan, 0, "digest")
    try:
        host.gather(plan, own, KEY, listener)
    except DrayError as error:
        told["said"] = str(error)
    used = resource.getrusage(resource.RUSAGE_SELF)
    told |= {"mib": used.ru_maxrss / _MIB, "cpu": used.ru_utime + used.ru_stime}
    sys.stdin.read()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _first(int(sys.argv[1]), float(sys.argv[2]))
