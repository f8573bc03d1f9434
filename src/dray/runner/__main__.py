"""`python -m dray.runner PLAN.json`: find out who this node is, meet the others, become the launcher."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from dray.runner import cores, locks, meeting, node, preflight, record

_HERE = os.path.dirname(os.path.abspath(__file__))
_SITE_PACKAGES_NOT_NEEDED = ("-S", "-E")


def main(path: str) -> int:
    """Only comes back when the launch failed."""
    with open(path, "rb") as file:
        plan = json.load(file)
    world = plan["world"]
    number = os.environ.get(world["identity"]["node"], "unknown")
    try:
        me = node.index(world, os.environ)
        node.require(plan)
        master = meeting.meet(world, me, digest(plan))
        placement = {**os.environ, **placed(world, os.environ)}
        preflight.check(plan, me, master, placement)
    except record.Refusal as refusal:
        print(refusal, file=sys.stderr)
        return refusal.code if refusal.recorded else _failed(plan, number, refusal.code, str(refusal), refusal)
    locks.clear(os.environ.get("TORCH_EXTENSIONS_DIR", ""))
    command = argv(plan, me, master)
    try:
        os.execvpe(command[0], command, placement)
    except OSError as error:
        why = f"the launcher cannot start: {command[0]}: {error.strerror}"
        print(why, file=sys.stderr)
        return _failed(plan, number, 127, why)


def digest(plan: Mapping[str, Any]) -> str:
    """What all nodes must agree on; each machine without a shared disk has its own user and counts its own attempts."""
    same = {key: value for key, value in plan.items() if key not in ("user", "attempt")}
    folder = json.dumps(plan["folder"])[1:-1]
    return hashlib.sha256(json.dumps(same, sort_keys=True).replace(folder, "").encode()).hexdigest()


def argv(plan: Mapping[str, Any], me: int, master: str) -> list[str]:
    """The launcher with what only this node knows in its place, then the keeper of each rank, then the command."""
    world = plan["world"]
    known = {
        "{node_rank}": str(me),
        "{master}": master,
        "{endpoint}": f"{master}:{world['port']}",
        "{is_host}": f"is_host={int(me == 0)}",
        "{ranks}": f"{_HERE}/ranks.py",
    }
    launcher = [known.get(word, word) for word in plan["launcher"]]
    keeper = [sys.executable, *_SITE_PACKAGES_NOT_NEEDED, f"{_HERE}/rank.py"]
    return [*launcher, *keeper, plan["folder"], str(world["size"]), world["nodes"][me]["name"], *plan["command"]]


def placed(world: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Where the ranks of this node run: the keeper of each moves to its share. Threads follow unless somebody said."""
    shares = cores.shares(world["ranks_per_node"], world, environ)
    given = environ.get(world["identity"]["cpus"], "")
    count = min(map(len, shares)) if shares else int(given if given.isdigit() else 1) // world["ranks_per_node"]
    found = {"OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(1, count))}
    if shares:
        found["DRAY_CORES"] = ";".join(map(cores.write, shares))
    told, ranks = found.get("DRAY_CORES", "not bound"), world["ranks_per_node"]
    if not shares and given.isdigit() and int(given) < ranks:
        told += f" ({given} for {ranks} ranks: ask for more, --cpus-per-task)"
    print(f"dray: cores of each rank: {told}; OMP_NUM_THREADS={found['OMP_NUM_THREADS']}", flush=True)
    return found


def _failed(plan: Mapping[str, Any], number: str, code: int, why: str, refusal: record.Refusal | None = None) -> int:
    name = (refusal and refusal.node) or os.environ.get(plan["world"]["identity"]["name"], "")
    rank = refusal.rank if refusal else None
    record.write(plan["folder"], f"node-{number}", node=name, rank=rank, code=code, why=why, log=None, last_lines=[])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
