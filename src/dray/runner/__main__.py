"""`python -m dray.runner PLAN.json`: find out who this node is, meet the others, supervise the launcher."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from dray.contract import files, run_folder
from dray.contract.cores import render
from dray.contract.findings import DrayError
from dray.runner import children, cores, locks, meeting, node, preflight, record

_HERE = os.path.dirname(os.path.abspath(__file__))
_SITE_PACKAGES_NOT_NEEDED = ("-S", "-E")


def main(path: str) -> int:
    """What the launcher ended with, or what kept it from being started."""
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
        locks.clear(os.environ.get("TORCH_EXTENSIONS_DIR", ""))
        return launch(plan, me, argv(plan, me, master), placement)
    except DrayError as error:
        print(error, file=sys.stderr)
        found = error.finding
        if not isinstance(error, meeting.StoppedError):
            name = found.node or os.environ.get(world["identity"]["name"], "")
            _record(plan, number, node=name, rank=found.rank, code=found.code, why=str(error))
        return found.code


def launch(plan: Mapping[str, Any], me: int, command: list[str], environ: Mapping[str, str]) -> int:
    """Run the launcher, pass on what this process is told, and record its failure where no rank has recorded one."""
    name = plan["world"]["nodes"][me]["name"]
    launcher = children.Children()
    try:
        # A session of its own: what the engine's group hears, it would hear twice.
        launcher.start(command, env=environ, session=True)
    except OSError as error:
        why = f"the launcher cannot start: {command[0]}: {error.strerror}"
        raise DrayError(why, code=127, node=name) from error
    stopped, code = False, 0
    while launcher.running:
        events = launcher.wait()
        for signal in events.signals:
            stopped = True
            launcher.tell(signal)
        code = events.ended.get(0, 0)
    if code and not stopped and not _rank_failures(plan, me):
        why = f"the launcher ended with {children.ended_with(code)}"
        _record(plan, str(me), node=name, rank=None, code=children.exit_code(code), why=why)
    return children.exit_code(code)


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
        found["DRAY_CORES"] = ";".join(map(render, shares))
    told, ranks = found.get("DRAY_CORES", "not bound"), world["ranks_per_node"]
    if not shares and given.isdigit() and int(given) < ranks:
        told += f" ({given} for {ranks} ranks: ask for more, --cpus-per-task)"
    print(f"dray: cores of each rank: {told}; OMP_NUM_THREADS={found['OMP_NUM_THREADS']}", flush=True)
    return found


def _rank_failures(plan: Mapping[str, Any], me: int) -> list[str]:
    """Paths of the records that this node's ranks have left."""
    each = plan["world"]["ranks_per_node"]
    paths = (f"{plan['folder']}/{run_folder.failure(f'rank-{me * each + local}')}" for local in range(each))
    return [path for path in paths if os.path.exists(path)]


def _record(plan: Mapping[str, Any], number: str, **found: object) -> None:
    log = f"{plan['folder']}/{run_folder.node_log(number)}"
    record.write(plan["folder"], f"node-{number}", **found, log=log, last_lines=files.tail(log))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
