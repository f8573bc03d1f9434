"""Records why this node or a rank of it failed, as files that outlive it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from dray.contract import files, hardware, run_folder
from dray.runner import output

_ENOUGH = 64  # records on the shared disk of a run of many ranks; twice as many, of ranks that tell of no other's end


def write(folder: str, name: str, *, own: str = "", **fields: object) -> None:
    """Write failures/NAME.json; a full disk must not hide the exit code as well.

    `own`, the node's own folder, gets it first. Then the shared disk gets only a node's first record, and few in all.
    """
    fields = {"time": time.time(), **fields}  # what follows takes a while
    if not fields.get("lost"):  # this node tells nothing of another that is gone
        from dray.runner import evidence  # noqa: PLC0415  only what has failed pays for it

        fields["evidence"] = evidence.collect(folder, fields.get("log"), fields.get("rank") if own else None)
    text = json.dumps(output.redacted(fields), indent=1)
    if own:
        _write(f"{own}/{run_folder.failure(name)}", text)
        if not _first(own, str(fields["node"])) or crowded(folder):
            return
    _write(f"{folder}/{run_folder.failure(name)}", text)


def _write(target: str, text: str) -> None:
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        files.write_atomic(target, text)
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


def _first(own: str, node: str) -> bool:
    """Whether no other rank of this node has failed before; one machine may be several nodes."""
    try:
        os.close(os.open(_mark(own, node), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        return False
    except OSError:  # a full disk
        return True
    return True


def _mark(own: str, node: str) -> str:
    return f"{own}/{run_folder.FAILURES}/{node}.first"


def crowded(folder: str, most: int = _ENOUGH) -> bool:
    """Whether there are so many records that one more tells nothing."""
    try:
        return len(os.listdir(f"{folder}/{run_folder.FAILURES}")) >= most
    except OSError:
        return False


def bring(own: str, folder: str, name: str) -> None:
    """Copy a record from the node's own folder to the shared disk, unless it has one of this name."""
    if not exists(folder, name) and not crowded(folder, 2 * _ENOUGH):
        copy(f"{own}/{run_folder.failure(name)}", f"{folder}/{run_folder.failure(name)}")


def exists(folder: str, name: str) -> bool:
    """Whether the run folder has a record of this name."""
    return os.path.exists(f"{folder}/{run_folder.failure(name)}")


def forget(own: str, node: str, names: Iterable[str]) -> None:
    """Delete the records of the last start from the node's own folder, before all ranks start again."""
    for path in (*(f"{own}/{run_folder.failure(name)}" for name in names), _mark(own, node)):
        with suppress(OSError):
            os.unlink(path)


def about(plan: Mapping[str, Any], me: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """The hardware and software of this node, as data."""
    accelerator = {"cuda": "cuda", "cuda12": "cuda", "rocm": "rocm", "rocm6": "rocm"}.get(
        plan.get("variant", ""), "cpu"
    )
    seen = hardware.look(accelerator, environ, packages=me == 0)
    return {"node": me, "name": plan["world"]["nodes"][me]["name"], **seen}


def introduce(plan: Mapping[str, Any], me: int, environ: Mapping[str, str], report: Callable[[str, Any], None]) -> None:
    """Save the hardware and software of this node, for the capsule; in a run of many ranks, tell the first node."""
    if plan["world"].get("logs_by_node"):
        report("about", about(plan, me, environ))
    else:
        this_node(plan, me, environ)


def this_node(plan: Mapping[str, Any], me: int, environ: Mapping[str, str]) -> None:
    """Write nodes/node-N.json, for the capsule; no run fails if it cannot be written."""
    target = f"{plan['folder']}/{run_folder.node(me)}"
    try:
        told = about(plan, me, environ)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        files.write_atomic(target, json.dumps(told, indent=1))
    except (OSError, ValueError) as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


def lines(target: str, told: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    _write(target, "".join(f"{json.dumps(one)}\n" for one in told))


def copy(source: str, target: str) -> None:
    """Copy a text file from the node's own folder."""
    with open(source, encoding="utf-8", errors="replace") as file:
        _write(target, file.read())


def saved(folder: str) -> None:
    """Note that all ranks have saved and ended, as they were asked to."""
    _write(f"{folder}/{run_folder.SAVED}", "")


def failing_nodes(folder: str, names: Iterable[str]) -> None:
    """Write the names of the unfit nodes, as sbatch --exclude takes them."""
    target = f"{folder}/{run_folder.FAILING_NODES}"
    try:
        files.write_atomic(target, ",".join(names) + "\n")
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


def set_aside(folder: str, restart: int, names: Iterable[str]) -> None:
    """Move failures/NAME.json to failures/restart-N: it is the reason for a restart, and did not end the run."""
    target = f"{folder}/{run_folder.restart(restart)}"
    try:
        os.makedirs(target, exist_ok=True)
        for name in names:
            path = f"{folder}/{run_folder.failure(name)}"
            if os.path.exists(path):
                os.replace(path, f"{target}/{name}.json")
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)
