"""Records why this node or a rank of it failed, as files that outlive it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from dray.contract import files, hardware, run_folder
from dray.runner import output


def write(folder: str, name: str, **fields: object) -> None:
    """Write failures/NAME.json; a full disk must not hide the exit code as well."""
    fields = {"time": time.time(), **fields}  # what follows takes a while
    if not fields.get("lost"):  # this node tells nothing of another that is gone
        from dray.runner import evidence  # noqa: PLC0415  only what has failed pays for it

        fields["evidence"] = evidence.collect(folder, fields.get("log"))
    _write(f"{folder}/{run_folder.failure(name)}", json.dumps(output.redacted(fields), indent=1))


def _write(target: str, text: str) -> None:
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        files.write_atomic(target, text)
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


def about(plan: Mapping[str, Any], me: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """The hardware and software of this node, as data."""
    accelerator = {"cuda": "cuda", "cuda12": "cuda", "rocm": "rocm", "rocm6": "rocm"}.get(
        plan.get("variant", ""), "cpu"
    )
    seen = hardware.look(accelerator, environ, packages=me == 0)
    return {"node": me, "name": plan["world"]["nodes"][me]["name"], **seen}


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
            with suppress(FileNotFoundError):  # there is none, or another node was first
                os.replace(f"{folder}/{run_folder.failure(name)}", f"{target}/{name}.json")
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)
