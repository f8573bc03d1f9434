"""Before the launch: what this node lacks, and whether all ranks hear one another, with a deadline that holds."""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dray.runner.record import Refusal, tail

_UNFIT = 69
_GRACE = 15.0  # seconds beyond the deadline in which ranks that still can have ended by themselves
_OTHERS = 5.0  # seconds in which the other nodes' ranks reach their own deadline
_HERE = os.path.dirname(os.path.abspath(__file__))


def check(plan: Mapping[str, Any], me: int, master: str, environ: Mapping[str, str]) -> None:
    """Come back when this node and the way to the others are fit."""
    wanted = plan["preflight"]
    if wanted is None:
        return
    began = time.monotonic()
    room(plan["folder"], wanted)
    os.makedirs(f"{plan['folder']}/preflight", exist_ok=True)
    code = _ranks(plan, me, master, environ)
    if code:
        raise _blame(plan, me, code)
    print(f"dray: preflight took {time.monotonic() - began:.1f} s", flush=True)


def room(folder: str, wanted: Mapping[str, Any], shm: str = "/dev/shm", scratch: str = "/tmp") -> None:  # noqa: S108
    """Refuse a node without room."""
    size = shutil.disk_usage(shm).total / 1e9
    if size < wanted["shared_memory_gb"]:
        raise Refusal(
            _UNFIT,
            f"{shm} is too small",
            wanted=f"{wanted['shared_memory_gb']} GB (preflight.shared_memory_gb)",
            found=f"{size:.3f} GB",
            fix="docker run --shm-size=1g; elsewhere ask the administrators: data workers and NCCL share memory there",
        )
    for place in (scratch, folder):
        free = shutil.disk_usage(place).free / 1e9
        if free < wanted["free_gb"]:
            raise Refusal(
                _UNFIT,
                f"{place} is full",
                wanted=f"{wanted['free_gb']} GB free (preflight.free_gb)",
                found=f"{free:.3f} GB",
                fix="remove what is not needed there, or leave this node out (sbatch --exclude)",
            )


def _ranks(plan: Mapping[str, Any], me: int, master: str, environ: Mapping[str, str]) -> int:
    """The exit code of this node's ranks; they end by themselves at the deadline, unless they cannot."""
    world, folder = plan["world"], plan["folder"]
    count = (str(len(world["nodes"])), str(world["ranks_per_node"]), str(me))
    argv = [sys.executable, "-S", "-E", f"{_HERE}/ranks.py", *count, master, str(world["port"])]
    argv += [sys.executable, "-m", "dray.checks.preflight", f"{folder}/plan.json"]
    log = os.open(f"{folder}/logs/preflight-{me}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    both = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    child = os.posix_spawn(argv[0], argv, environ, file_actions=both)
    os.close(log)
    deadline = time.monotonic() + world["meet_within"] + plan["preflight"]["within"] + _GRACE
    stopped: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        stopped.append(number)
        os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                if stopped:  # by whoever stops the run: that is no finding of this node's
                    sys.exit(128 + stopped[0])
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if time.monotonic() > deadline:
                for rank in told(folder):
                    if rank["node"] == world["nodes"][me]["name"]:
                        _kill(rank["pid"])
                deadline += _GRACE
            time.sleep(0.02)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def told(folder: str) -> list[dict[str, Any]]:
    """How far each rank came, by what it left; ranks of machines that share no disk with this one are not seen."""
    found = []
    for path in glob.glob(f"{glob.escape(folder)}/preflight/rank-*.json"):
        with open(path, encoding="utf-8") as file:
            found.append(json.load(file))
    return sorted(found, key=lambda rank: int(rank["rank"]))


def _blame(plan: Mapping[str, Any], me: int, code: int) -> Refusal:
    folder, log = plan["folder"], f"{plan['folder']}/logs/preflight-{me}.log"
    ranks = told(folder)
    wrong = next((rank["wrong"] for rank in ranks if "wrong" in rank), None)
    if wrong:
        return Refusal(_UNFIT, **wrong)
    crashed = min((rank for rank in ranks if "crashed" in rank), key=lambda rank: float(rank["time"]), default=None)
    if crashed:
        who = f"rank {crashed['rank']} on {crashed['node']}"
        found = f"{crashed['crashed']}, in: {crashed['phase']}"
        return Refusal(_UNFIT, f"{who} failed", wanted="collectives that end", found=found, fix=f"see {log}")
    deadline = time.monotonic() + _OTHERS
    while time.monotonic() < deadline and len(_silent(folder, ranks := told(folder))) > 1:
        time.sleep(0.05)
    guilty = behind(plan, folder, ranks)
    if not guilty:
        last = "\n".join(tail(log, 5))
        return Refusal(_UNFIT, f"the preflight ended with code {code}", wanted="0", found=last, fix=f"see {log}")
    who = ", ".join(f"rank {rank['rank']} on {rank['node']}" for rank in guilty)
    return Refusal(
        _UNFIT,
        f"{who} did not answer in {max(rank.get('limit', 0) for rank in ranks)} s",
        wanted="all ranks together in meet_within seconds, and through the collectives in preflight.within",
        found=f"stopped in: {guilty[0]['phase']}; the others waited in: {max(rank['phase'] for rank in ranks)}",
        fix="leave that node out (sbatch --exclude); preflight/rank-*.stack in the run's folder has where each stood",
    )


def _silent(folder: str, ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Ranks that were not even able to say where they stood at the deadline."""
    stacks = (f"{folder}/preflight/rank-{rank['rank']}.stack" for rank in ranks)
    return [rank for rank, stack in zip(ranks, stacks, strict=True) if not os.path.getsize(stack)]


def behind(plan: Mapping[str, Any], folder: str, ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Whom the others waited for: who came least far, or else who was silent at the deadline."""
    slowest = [rank for rank in ranks if rank["order"] < max(other["order"] for other in ranks)]
    seen = {rank["rank"] for rank in ranks}
    each = plan["world"]["ranks_per_node"]
    never = [
        {"rank": number, "node": plan["world"]["nodes"][number // each]["name"], "phase": "its start"}
        for number in range(plan["world"]["size"])
        if number not in seen and plan["world"]["shared_folder"]
    ]
    silent = _silent(folder, ranks)
    return [*never] or [*slowest] or (silent if len(silent) < len(ranks) else [])
