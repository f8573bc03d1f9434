"""`python -m dray.runner PLAN.json`: find out who this node is, meet the others, become the launcher."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

from dray.runner import meeting, node, record

_NODE_RANK = "{node_rank}"


def main(path: str) -> int:
    """Only comes back when the launch failed."""
    with open(path, "rb") as file:
        text = file.read()
    plan = json.loads(text)
    names = plan["world"]["identity"]
    number = os.environ.get(names["node"], "unknown")
    try:
        meeting.meet(plan["world"], node.index(plan["world"], os.environ), hashlib.sha256(text).hexdigest())
    except record.Refusal as refusal:
        print(refusal, file=sys.stderr)
        return refusal.code if refusal.recorded else _failed(plan, number, refusal.code, str(refusal))
    command = argv(plan, number)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        why = f"the launcher cannot start: {command[0]}: {error.strerror}"
        print(why, file=sys.stderr)
        return _failed(plan, number, 127, why)


def argv(plan: dict[str, Any], number: str) -> list[str]:
    """The launcher with this node's number in its place, then the keeper of each rank, then the command."""
    launcher = [number if word == _NODE_RANK else word for word in plan["launcher"]]
    keeper = [sys.executable, "-S", "-E", f"{os.path.dirname(os.path.abspath(__file__))}/rank.py"]
    world = plan["world"]
    name = world["nodes"][int(number)]["name"]
    return [*launcher, *keeper, plan["folder"], str(world["size"]), name, *plan["command"]]


def _failed(plan: dict[str, Any], number: str, code: int, why: str) -> int:
    name = os.environ.get(plan["world"]["identity"]["name"], "")
    record.write(plan["folder"], f"node-{number}", node=name, rank=None, code=code, why=why, log=None, last_lines=[])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
