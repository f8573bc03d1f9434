"""Before the launch: what this node lacks, and whether all ranks hear one another, with a deadline that holds."""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from dray.runner.record import Refusal

_UNFIT = 69
_GRACE = 15.0  # seconds beyond the deadlines in which ranks that still can have ended by themselves
_OTHERS = 5.0  # seconds in which the word of other nodes' ranks reaches this one
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def check(plan: Mapping[str, Any], me: int, master: str, environ: Mapping[str, str]) -> None:
    """Come back when this node and the way to the others are fit."""
    wanted = plan["preflight"]
    if wanted is None:
        return
    began = time.monotonic()
    folder = plan["folder"]
    try:
        room(folder, wanted)
        os.makedirs(f"{folder}/preflight", exist_ok=True)
        codes = _ranks(plan, me, master, environ)
        for rank, code in codes.items():
            if code < 0:
                _note(folder, plan, rank, signal.Signals(-code).name)
    except OSError as error:
        raise Refusal(
            _UNFIT,
            "the preflight cannot begin",
            wanted=f"{folder} and /tmp, where this node can write",
            found=str(error),
            fix="is there room, and a quota left?",
        ) from error
    if any(codes.values()):
        raise _blame(plan, me)
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


def _ranks(plan: Mapping[str, Any], me: int, master: str, environ: Mapping[str, str]) -> dict[int, int]:
    """How each of this node's ranks ended; they end by themselves at a deadline, unless they cannot.

    Not by ranks.py: none of them may be stopped since another has ended, or it could not say where it stood.
    """
    world, folder = plan["world"], plan["folder"]
    each = world["ranks_per_node"]
    log = os.open(f"{folder}/logs/preflight-{me}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    argv = [sys.executable, "-m", "dray.checks.preflight", f"{folder}/plan.json"]
    common = {"WORLD_SIZE": str(world["size"]), "MASTER_ADDR": master, "MASTER_PORT": str(world["port"])}
    running: dict[int, int] = {}
    stopped: list[int] = []

    def end(number: int, _frame: object) -> None:
        stopped.append(number)
        _tell(running, signal.SIGKILL)

    # Nobody may be asked to end before all that must end are known here.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for number in _SIGNALS:
        signal.signal(number, end)
    for local in range(each):
        rank = me * each + local
        env = {**environ, **common, "RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each)}
        streams = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        running[os.posix_spawn(argv[0], argv, env, file_actions=streams, setsigmask=())] = rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.close(log)
    ended = _wait(running, time.monotonic() + world["meet_within"] + plan["preflight"]["within"] + _GRACE)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if stopped:  # by whoever stops the run: that is no finding of this node's
        sys.exit(128 + stopped[0])
    return ended


def _wait(running: dict[int, int], deadline: float) -> dict[int, int]:
    """Each rank's code, negative for a signal that was not ours; one that even SIGKILL does not end is left alone."""
    codes: dict[int, int] = {}
    killed = False
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            code = os.waitstatus_to_exitcode(status)
            codes[running.pop(child)] = _UNFIT if killed and code < 0 else code
            if code:  # the others come to their own deadline about now, or wait for this one in vain
                deadline = min(deadline, time.monotonic() + _OTHERS)
        elif time.monotonic() > deadline:
            if killed:
                return {**codes, **dict.fromkeys(running.values(), _UNFIT)}
            _tell(running, signal.SIGKILL)
            deadline, killed = time.monotonic() + _GRACE, True
        else:
            time.sleep(0.02)
    return codes


def _tell(running: Mapping[int, int], number: int) -> None:
    for child in list(running):
        os.kill(child, number)


def _note(folder: str, plan: Mapping[str, Any], rank: int, by: str) -> None:
    """What a rank could not say itself, for all nodes to see."""
    said = told(folder).get(rank) or {"rank": rank, "node": _node(plan, rank), "phase": "its start", "order": -1}
    path = f"{folder}/preflight/rank-{rank}.json"
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump({**said, "killed": by}, file)
    os.replace(f"{path}.part", path)


def _node(plan: Mapping[str, Any], rank: int) -> str:
    return str(plan["world"]["nodes"][rank // plan["world"]["ranks_per_node"]]["name"])


def told(folder: str) -> dict[int, dict[str, Any]]:
    """How far each rank came, by what it left; ranks of machines that share no disk with this one are not seen."""
    found = {}
    for path in glob.glob(f"{glob.escape(folder)}/preflight/rank-*.json"):
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
        stack = f"{folder}/preflight/rank-{said['rank']}.stack"
        said["expired"] = os.path.exists(stack) and os.path.getsize(stack) > 0
        found[int(said["rank"])] = said
    return found


def _blame(plan: Mapping[str, Any], me: int) -> Refusal:
    """By the word of all ranks, and with some patience: who is to blame may be the last to be heard of."""
    deadline = time.monotonic() + _OTHERS
    while True:
        last = time.monotonic() > deadline
        found = finding(plan, told(plan["folder"]), f"logs/preflight-{me}.log", last=last)
        if found:
            return found
        time.sleep(0.05)


def finding(plan: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]], log: str, *, last: bool) -> Refusal | None:
    """What went wrong, from how far each rank came. None where it is not sure yet, and more may be heard."""
    for rank in ranks.values():
        if "wrong" in rank:
            return Refusal(_UNFIT, **rank["wrong"])
        if "killed" in rank:
            return _of(rank, f"was killed by {rank['killed']}", f"in: {rank['phase']}", f"see {log} of that node")
    ended = {
        number for number, rank in ranks.items() if rank["expired"] or "crashed" in rank or rank["phase"] == "done"
    }
    silent = [number for number in range(plan["world"]["size"]) if number not in ended]
    crashed = [rank for rank in ranks.values() if "crashed" in rank]
    if not last and (silent or crashed):
        return None
    expired = [rank for rank in ranks.values() if rank["expired"]]
    if expired:
        return _hung(plan, ranks, expired, silent)
    if crashed:
        first = min(crashed, key=lambda rank: (rank["order"], rank["time"]))
        return _of(first, "failed", f"{first['crashed']}, in: {first['phase']}", f"see {log} of that node")
    return Refusal(
        _UNFIT, "the preflight ended without a word", wanted="a report of each rank", found="none", fix=f"see {log}"
    )


def _hung(
    plan: Mapping[str, Any],
    ranks: Mapping[int, Mapping[str, Any]],
    expired: list[Mapping[str, Any]],
    silent: list[int],
) -> Refusal:
    """Whom the others waited for: who never began, or came least far, or could not say where it stood."""
    limit, furthest = (
        max(expired, key=lambda rank: int(rank["order"])),
        max(ranks.values(), key=lambda r: int(r["order"])),
    )
    never = [number for number in silent if number not in ranks and plan["world"]["shared_folder"]]
    slowest = [number for number, rank in ranks.items() if rank["order"] < furthest["order"]]
    guilty = never or slowest or [number for number in silent if number in ranks]
    if not guilty:
        nodes = " ".join(sorted({rank["node"] for rank in ranks.values()}))
        return Refusal(
            _UNFIT,
            f"no rank got through {furthest['phase']} in {limit['limit']} s",
            wanted="collectives that end (preflight.within)",
            found=f"all ranks hang in it, on {nodes}",
            fix="preflight/rank-*.stack in the run's folder has where each stood, nccl-*.log what NCCL said",
        )
    known = ranks.get(guilty[0], {"rank": guilty[0], "node": _node(plan, guilty[0]), "phase": "its start"})
    return Refusal(
        _UNFIT,
        ", ".join(f"rank {number} on {_node(plan, number)}" for number in guilty[:4])
        + (f" and {len(guilty) - 4} more" if guilty[4:] else "")
        + f" did not answer in {limit['limit']} s",
        wanted="all ranks together in meet_within seconds, and through the collectives in preflight.within",
        found=f"stopped in: {known['phase']}; the others waited in: {furthest['phase']}",
        fix="leave that node out (sbatch --exclude); preflight/rank-*.stack in the run's folder has where each stood",
        node=_node(plan, guilty[0]),
        rank=guilty[0],
    )


def _of(rank: Mapping[str, Any], what: str, found: str, fix: str) -> Refusal:
    who = f"rank {rank['rank']} on {rank['node']}"
    wanted = "a rank that comes through the preflight"
    return Refusal(_UNFIT, f"{who} {what}", wanted=wanted, found=found, fix=fix, node=rank["node"], rank=rank["rank"])
