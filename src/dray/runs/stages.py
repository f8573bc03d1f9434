"""The stage that a running attempt has reached, from the files of each stage, and the state of its nodes."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dray.contract import files, run_folder
from dray.runs import metrics
from dray.runs.metrics import Event, Rare
from dray.runs.paths import RunPaths
from dray.runs.reading import dig, table, written

_HEAD = 1 << 18  # bytes at the beginning of a node's log
_MOST = 16  # warnings, and slow ranks
_JOINED, _PROVED = b"dray: cores of each rank: ", b"dray: preflight took "
_QUIET_S = 120.0


class Stage(BaseModel):
    """A completed stage."""

    model_config = ConfigDict(frozen=True)

    name: str
    s: float
    """Seconds from the attempt's start to the stage's end."""


class Node(BaseModel):
    """A node, from the files of its ranks and its runner."""

    model_config = ConfigDict(frozen=True)

    name: str
    ranks: list[int]
    quiet_s: float | None = None
    """Seconds since one of its logs was last written; None without logs."""
    notes: list[str] = []
    """Failures and slow ranks."""


class Live(BaseModel):
    """A running attempt."""

    model_config = ConfigDict(frozen=True)

    stage: str
    stages: list[Stage] = []
    nodes: list[Node] = []
    quiet_s: float | None = None
    """Seconds since any of its files was last written."""
    restarts: int = 0
    notes: list[str] = []
    """Slow ranks, failed saves, loss jumps, and a request to end."""


def live(paths: RunPaths, plan: dict[str, Any], rare: Rare) -> Live:
    """The state of a running attempt; `rare` caches its metrics between calls."""
    began = written(paths.plan) or time.time()
    tail = list[Event]()
    with suppress(OSError):  # the state warns of it
        rare.look()
        tail = metrics.tail(paths.metrics)
    told = _told(rare)
    restarts = _restarts(paths)
    nodes = _nodes(paths, plan, told)
    ages = [node.quiet_s for node in nodes if node.quiet_s is not None]
    ages += [time.time() - at for at in [written(paths.metrics)] if at]
    quiet = round(max(0.0, min(ages)), 1) if ages else None
    if quiet is not None and quiet < _QUIET_S and not dig(plan, "recipe", "command"):  # each rank logs each step
        nodes = [_silent(node) for node in nodes]
    notes = [text for _, text in told[-_MOST:]]
    with suppress(OSError):
        if asked := files.read(paths.folder / run_folder.STOP).decode(errors="replace").split():
            notes.append(f"asked to save and end ({asked[0][:40]})")
    if quiet is not None and quiet > _QUIET_S:
        notes.append(f"no output for {duration(quiet)}")
    return Live(
        stage=_stage(paths, plan, tail),
        stages=_stages(paths, began, rare),
        nodes=nodes,
        quiet_s=quiet,
        restarts=len(restarts),
        notes=notes,
    )


def _stage(paths: RunPaths, plan: dict[str, Any], tail: list[Event]) -> str:
    last = tail[-1] if tail else {}
    restarted = max(filter(None, map(written, _restarts(paths))), default=0.0)
    if tail and (metrics.number(last, "time") or 0.0) >= restarted:
        kind = last.get("event")
        done = "all steps are done: it evaluates, saves and writes the result"
        if kind == "end" or (kind == "step" and last.get("step") == _steps(plan, tail)):
            return done
        return "compiling before the first step" if kind == "start" else "training"
    return "all ranks are restarting" if restarted else _started(paths, plan)


def _started(paths: RunPaths, plan: dict[str, Any]) -> str:
    """The stage before the first line of metrics, or of a command, which writes none."""
    log, rendezvous = _head(paths.node_log(0)), paths.folder / run_folder.RENDEZVOUS
    proved = not plan.get("preflight") or _PROVED in log
    stages = {
        "the command runs" if dig(plan, "recipe", "command") else "ranks load the data and build the model":
            paths.rank_log(0).exists(),
        "the launcher starts the ranks" if proved else "preflight": _JOINED in log,
        "rendezvous: the first node waits for the others": rendezvous.exists(),
        "nodes check their copy of the image and start it" if plan.get("stage") else "nodes start the image":
            paths.node_log(0).exists(),
        "Slurm starts the nodes" if plan.get("job") else "the nodes start": True,
    }  # fmt: skip
    return next(stage for stage, reached in stages.items() if reached)


def _stages(paths: RunPaths, began: float, rare: Rare) -> list[Stage]:
    """The completed stages whose time is recorded."""
    at = {
        "image started": _image_started(paths.folder / run_folder.RENDEZVOUS),
        "preflight passed": written(paths.preflight_report),
    }
    at |= {name: metrics.number(rare.first.get(kind, {}), "time") for kind, name in _BY_EVENT.items()}
    return [Stage(name=name, s=round(max(0.0, when - began), 1)) for name, when in at.items() if when]


def _image_started(rendezvous: Path) -> float | None:
    """When the first node's runner began; after the preflight the file is rewritten with that time in it."""
    told = table(rendezvous, []) or {}
    return metrics.number(dig(told, "times") or {}, "runner") or written(rendezvous)


_BY_EVENT = {"start": "model built", "step": "first step"}


def _told(rare: Rare) -> list[tuple[str, str]]:
    """Notes from the metrics, each with its node's name."""
    found: list[tuple[str, str]] = []
    unsaved: dict[str, str] = {}
    for event in rare.events:
        kind, node = event.get("event"), str(event.get("node", ""))[:80]
        if kind == "slow" and (times := metrics.number(event, "times")):
            rank = metrics.whole(event, "rank")
            found.append((node, f"slow: rank {rank} on {node}, {times:.2f} times the median rank"))
        elif kind in ("checkpoint", "mirror"):
            what = "saved" if kind == "checkpoint" else "copied to the mirror"
            why = f"the checkpoint of step {metrics.whole(event, 'checkpoint')} is not {what}"
            unsaved[str(kind)] = "" if event.get("saved") else f"{why}: {str(event.get('why'))[:200]}"
        elif kind == "divergence":
            found.append(("", f"at step {metrics.whole(event, 'last_step')}: {str(event.get('why'))[:200]}"))
    return [*found, *(("", text) for text in unsaved.values() if text)]


def _nodes(paths: RunPaths, plan: dict[str, Any], told: list[tuple[str, str]]) -> list[Node]:
    names, each = dig(plan, "world", "nodes"), dig(plan, "world", "ranks_per_node")
    each = each if isinstance(each, int) and 0 < each <= 1024 else 1
    logs, failures = _listed(paths.logs), _listed(paths.failures)
    found = []
    for number, node in enumerate(names if isinstance(names, list) else []):
        name = str(dig(node, "name"))[:80]
        ranks = range(number * each, (number + 1) * each)
        own = [f"node-{number}", *(f"rank-{rank}" for rank in ranks)]
        at = max((logs[f"{one}.log"] for one in own if f"{one}.log" in logs), default=None)
        notes = [text for about, text in told if about == name][:_MOST]
        broken = [one for one in own if f"{one}.json" in failures]
        lost = any(re.fullmatch(rf"node-\d+-lost-{number}\.json", one) for one in failures)
        notes += [f"failed: {', '.join(broken[:4])}{', ...' * (len(broken) > 4)}"] if broken else []
        notes += ["lost"] if lost else []
        quiet = None if at is None else round(max(0.0, time.time() - at), 1)
        found.append(Node(name=name, ranks=list(ranks), quiet_s=quiet, notes=notes))
    return found


def _silent(node: Node) -> Node:
    if node.quiet_s is None or node.quiet_s <= _QUIET_S:
        return node
    return node.model_copy(update={"notes": [*node.notes, f"silent for {duration(node.quiet_s)}, unlike the others"]})


def _listed(folder: Path) -> dict[str, float]:
    """The files of a folder, and when each was last written."""
    found = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                found[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    return found


def _restarts(paths: RunPaths) -> list[Path]:
    return [path for path in paths.failures.glob(run_folder.restart("*").partition("/")[2]) if path.is_dir()]


def _steps(plan: dict[str, Any], tail: list[Event]) -> int | None:
    started = next((event for event in reversed(tail) if event.get("event") == "start"), {})
    return metrics.whole(started, "steps") or dig(plan, "recipe", "train", "steps")


def _head(path: Path) -> bytes:
    with suppress(OSError), files.open_regular(path) as file:
        return file.read(_HEAD)
    return b""


def duration(seconds: float) -> str:
    """The duration in its two largest units: `3 h 12 min`."""
    whole = int(seconds)
    for size, unit, small, of in ((86400, "d", "h", 3600), (3600, "h", "min", 60), (60, "min", "s", 1)):
        if whole >= size:
            rest = whole % size // of
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def measured(seconds: float) -> str:
    """A measured time: `340 ms`, `2.5 s`; from 100 s on as `duration`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.1f} s" if round(seconds, 1) < 100 else duration(seconds)
