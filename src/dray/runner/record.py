"""What stopped this node or this rank, as a file that outlives it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from dray.contract import files, hardware, run_folder
from dray.runner import output


def write(folder: str, name: str, **fields: object) -> None:
    """failures/NAME.json. A disk that is full must not hide the exit code as well."""
    target = f"{folder}/{run_folder.failure(name)}"
    if not fields.get("lost"):  # this node tells nothing of another that is gone
        from dray.runner import evidence  # noqa: PLC0415  only what has failed pays for it

        fields["evidence"] = evidence.collect(folder, fields.get("log"))
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        files.write_atomic(target, json.dumps({"time": time.time(), **output.redacted(fields)}, indent=1))
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


def this_node(plan: Mapping[str, Any], me: int, environ: Mapping[str, str]) -> None:
    """nodes/node-N.json, for the capsule; no run fails for want of it."""
    target = f"{plan['folder']}/{run_folder.node(me)}"
    accelerator = {"cuda": "cuda", "cuda12": "cuda", "rocm": "rocm"}.get(plan.get("variant", ""), "cpu")
    try:
        seen = hardware.look(accelerator, environ, packages=me == 0)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        told = {"node": me, "name": plan["world"]["nodes"][me]["name"], **seen}
        files.write_atomic(target, json.dumps(told, indent=1))
    except (OSError, ValueError) as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


def failing_nodes(folder: str, names: Iterable[str]) -> None:
    """Those that are unfit by their own check, as sbatch --exclude takes them."""
    target = f"{folder}/{run_folder.FAILING_NODES}"
    try:
        files.write_atomic(target, ",".join(names) + "\n")
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)


def set_aside(folder: str, restart: int, names: Iterable[str]) -> None:
    """failures/NAME.json to failures/restart-N: it did not end the run, and says why all ranks were started again."""
    target = f"{folder}/{run_folder.restart(restart)}"
    try:
        os.makedirs(target, exist_ok=True)
        for name in names:
            path = f"{folder}/{run_folder.failure(name)}"
            if os.path.exists(path):
                os.replace(path, f"{target}/{name}.json")
    except OSError as error:
        print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)
