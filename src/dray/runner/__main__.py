"""`python -m dray.runner PLAN.json`: find the other nodes, then supervise this node's launcher."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from dray.contract import exit_codes, files, findings, run_folder, scratch, unexpected
from dray.contract.findings import ConfigError, DrayError, Finding, UnfitError
from dray.contract.startup import PREFLIGHT, RENDEZVOUS
from dray.runner import (
    address,
    check,
    children,
    control,
    environment,
    evidence,
    first_failure,
    node,
    output,
    record,
    rendezvous,
)
from dray.runner.file_watch import FileWatch
from dray.runner.hello import StoppedError
from dray.runner.protocol import Restart
from dray.runner.start_timings import StartTimings

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SITE_PACKAGES_NOT_NEEDED = ("-S", "-E")
_ENDING_S = 10.0  # seconds from SIGKILL to the end of what this node has started
# A rank holds a file for each connection: 1,024, the usual soft limit, are too few beside other users who connect to
# Gloo's port. Not all that some machines allow: old programs close each number up to the limit, and 1,000,000,000 take
# minutes.
_FILES = 65_536


def main(path: str) -> int:
    """This node's exit code: the launcher's, or that of the failure which kept it from starting."""
    plan = files.parse_json(files.text(path, "the plan", own=True), "the plan", path)
    if not isinstance(plan, dict) or not isinstance(plan.get("world"), dict) or "identity" not in plan["world"]:
        raise ConfigError("the plan is damaged", where=path, fix="submit the run again")
    world = plan["world"]
    environment.merge(plan)
    os.environ[output.PASSED] = " ".join(plan.get("recipe", {}).get("pass_env", ()))
    allow_files()
    number = os.environ.get(world["identity"]["node"], "unknown")
    clock = {"runner": time.time()}
    links = lock = unfit = supervised = None
    try:
        me = node.index(world, os.environ)
        parts = StartTimings(plan, me)
        node.require(plan, os.environ)
        lock = scratch.take(plan["scratch"])
        children.adopt()
        if unfit := parts.checked(check.node, plan, me):
            # Before the rendezvous: srun ends all nodes with the first one that ends.
            _record(plan, number, unfit, why=str(unfit))
        start, at, listener = Restart(), None, None
        watch = FileWatch("" if me else f"{plan['folder']}/{run_folder.STOP}")
        while True:
            channels, at, listener = rendezvous.meet(plan, me, digest(plan), start, at, listener, unfit)
            if links:
                links.drop()
            clock.setdefault("met", time.time())
            parts.lap(RENDEZVOUS)
            own = channels[0].line.getsockname()[0] if me else at[0]
            supervised = supervised or children.Children()
            links = control.Control(plan, me, supervised, channels, start, at[1], watch, parts)
            code = launch(plan, me, supervised, links, at, listener, start, address.gloo(own), clock, parts)
            if not links.next and not links.may_restart():
                _leave(plan, me, links, at)
                return code
            start, listener = restart(plan, me, supervised, links, listener, start)
            at = (at[0], start.port)
    except Exception as raised:
        error = findings.error(unfit) if unfit else unexpected.error(raised)
        return _fail(plan, number, error, links, told=bool(unfit))
    except SystemExit:  # a signal during the preflight, perhaps to this node alone
        if links:
            links.heard(signal.SIGTERM)
            links.lead(lambda code: failure(plan, me, code))
        raise
    finally:
        if links and supervised:
            _sweep(supervised)
            links.close()
        if lock is not None:
            os.close(lock)


def allow_files() -> None:
    """Raise the limit of open files for this process, and so for the preflight, the launcher and all ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def launch(
    plan: Mapping[str, Any],
    me: int,
    supervised: children.Children,
    links: control.Control,
    store: tuple[str, int],
    listener: socket.socket | None,
    start: Restart,
    gloo: Mapping[str, str],
    clock: Mapping[str, float],
    parts: StartTimings,
) -> int:
    """Hand the socket to the store, run the preflight and the launcher; return this node's exit code."""
    world, since = plan["world"], time.time()
    os.environ[evidence.BEFORE] = evidence.oom_kills()
    environ = environment.of(plan, me, store, start, gloo)
    record.this_node(plan, me, environ)
    ended = functools.partial(_store_ended, plan, me, links)
    if listener and (world["size"] > 1 or "{ranks}" not in plan["launcher"]):
        serve(supervised, listener, store, ended)
    elif listener:  # most programs of one rank never ask for it, and each store costs an import of torch
        supervised.watch(listener.fileno(), lambda: serve(supervised, listener, store, ended, watched=True))
    if plan["preflight"] is not None and not start.number:
        from dray.runner import preflight  # noqa: PLC0415  most of a minute of torch is behind it, and 10 ms of its own

        preflight.check(plan, me, supervised, environ, links)
        parts.lap(PREFLIGHT)
    if environ.get("TORCH_EXTENSIONS_DIR"):
        from dray.runner import locks  # noqa: PLC0415

        locks.clear(environ["TORCH_EXTENSIONS_DIR"], since if start.number else None)
    command = argv(plan, me, *store)
    # torchrun prints the exception of a rank that torch's @record has written down.
    between = output.between()
    parts.launched()
    try:
        # A session of its own: what the engine's group hears, it would hear twice.
        supervised.start(command, env=environ, session=True, output=between.writer if between else None)
    except OSError as error:
        raise DrayError(f"the launcher cannot start: {command[0]}: {error.strerror}", code=127) from error
    rendezvous.clocked(plan, me, start, store, clock)
    if between:
        between.watch(supervised)

    def explain(ended: int) -> Finding:
        if between:
            between.finish()  # its last lines may be the reason
        return failure(plan, me, ended)

    code = links.lead(explain)
    if between:
        between.finish()
    _last_words(plan, me, links)
    return code


def _leave(plan: Mapping[str, Any], me: int, links: control.Control, store: tuple[str, int]) -> None:
    """Record what is known once all nodes have ended: lost nodes; on the first node, whether all ranks have saved, and
    whether they were in one process group."""
    _record_lost(plan, me, links)
    if not me and links.saved and not links.stopped and not links.lost:
        record.saved(plan["folder"])
    if not me and not links.stopped and (links.saved or not links.cause):
        links.joined.record(plan["folder"], store)


def _record_lost(plan: Mapping[str, Any], me: int, links: control.Control) -> None:
    for other, (since, found) in links.lost.items():
        _record(plan, str(other), found, why=str(found), name=f"node-{me}-lost-{other}", time=since)


def _fail(plan: Mapping[str, Any], number: str, error: DrayError, links: control.Control | None, *, told: bool) -> int:
    """Print why the ranks were not started, record it unless it is `told`; return the exit code once all have ended."""
    print(error, file=sys.stderr)
    found = error.finding
    follows = isinstance(error, StoppedError)
    if not told and not follows:
        found = found._replace(node=found.node or os.environ.get(plan["world"]["identity"]["name"], ""))
        _record(plan, number, found, why=str(error))
    if links:
        if not follows:
            links.fail(found)
        links.lead(lambda _: found)
        _last_words(plan, int(number), links)
        _record_lost(plan, int(number), links)
    return found.code


def _sweep(supervised: children.Children) -> None:
    """Kill what is left of this node's start, before the other nodes hear that it has ended."""
    if supervised.sweep(_ENDING_S):
        return
    found = Finding(
        f"processes of this node did not end within {_ENDING_S:.0f} s of SIGKILL",
        wanted="no process of the run outlives the job",
        fix="tell the administrators: a device or a file system of this node hangs",
    )
    print(f"dray: {found}", file=sys.stderr, flush=True)


def _last_words(plan: Mapping[str, Any], me: int, links: control.Control) -> None:
    """Record what no rank could."""
    if links.cause and not links.stopped:
        first_failure.failure(plan, me)
    if links.cause and not plan["world"]["shared_folder"]:  # the record is on another machine
        if links.hang and links.hang.since:
            links.hang.write_record(links.cause)
        else:
            _record(plan, str(me), links.cause, why=str(links.cause))


def restart(
    plan: Mapping[str, Any],
    me: int,
    supervised: children.Children,
    links: control.Control,
    listener: socket.socket | None,
    start: Restart,
) -> tuple[Restart, socket.socket | None]:
    """Prepare the next start, once all processes of this one have ended; the first node tells the others."""
    world = plan["world"]
    evidence.require_image(world["nodes"][me]["name"])
    if listener:
        listener.close()
    swept = supervised.sweep(_ENDING_S)
    if links.stopped:  # and the first node had called to the next start already: it ends that one
        os.kill(os.getpid(), signal.SIGTERM)
    if links.asked:
        os.kill(os.getpid(), signal.SIGUSR1)
    if not swept:
        raise UnfitError(
            "the ranks cannot be started again",
            wanted="a node whose earlier ranks have ended",
            found=f"processes that did not end within {_ENDING_S:.0f} s of SIGKILL",
            fix="leave that node out (sbatch --exclude): a device or a file system hangs",
            node=world["nodes"][me]["name"],
        )
    listener = None
    if me == 0:
        listener = address.listen(world)
        links.restart(start.following(listener.getsockname()[1]))
    assert links.next is not None
    ranks = [f"rank-{rank}" for rank in range(me * world["ranks_per_node"], (me + 1) * world["ranks_per_node"])]
    record.set_aside(plan["folder"], links.next.number, ["hang", f"node-{me}", *ranks])
    why = links.cause.problem if links.cause else ""
    print(f"dray: restart {links.next.number} of {world['max_restarts']}: {why}", flush=True)
    return links.next, listener


def serve(
    supervised: children.Children,
    listener: socket.socket,
    store: tuple[str, int],
    ended: Callable[[int], None],
    *,
    watched: bool = False,
) -> None:
    """Start a process with torch that serves the store on this socket until the runner ends."""
    if watched:
        supervised.forget(listener.fileno())
    argv = [sys.executable, "-m", "dray.tcp_store", store[0], str(store[1]), str(listener.fileno())]
    supervised.start(argv, on_parent_death=signal.SIGKILL, inherit=listener.fileno(), session=True, ended=ended)
    listener.close()


def _store_ended(plan: Mapping[str, Any], me: int, links: control.Control, code: int) -> None:
    """End the run of dray's trainer, which needs the store to save when asked; other programs may not need it."""
    if not code or links.cause or links.stopped:  # 0: there is no torch, so nobody can ask for it
        return
    found = Finding(
        f"the store has ended: {children.ended_with(code)}",
        fix="start the run again; with more memory (sbatch --mem) if the kernel killed the store for lack of it",
        code=exit_codes.RETRY,
        node=plan["world"]["nodes"][me]["name"],
    )
    if not plan.get("recipe", {}).get("train"):
        print(f"dray: {found}", file=sys.stderr, flush=True)
        return
    if plan["world"]["shared_folder"]:
        _record(plan, str(me), found, why=str(found))
    links.end(found)


def failure(plan: Mapping[str, Any], me: int, code: int) -> Finding:
    """Why this node failed: its ranks' first failure, or else the launcher's own exit, which is then recorded."""
    name = plan["world"]["nodes"][me]["name"]
    if one := first_failure.failure(plan, me):
        problem = f"rank {one['rank']} on {name}: {one['why']}"
        return Finding(problem, where=one["log"], code=one["code"], node=name, rank=one["rank"])
    found = Finding(f"the launcher ended: {children.ended_with(code)}", code=children.exit_code(code), node=name)
    _record(plan, str(me), found, why=found.problem)
    return found


def digest(plan: Mapping[str, Any]) -> str:
    """The digest of what all nodes must share of the plan: users and attempts differ between machines of a hostfile."""
    same = {key: value for key, value in plan.items() if key not in ("user", "attempt")}
    text = json.dumps(same, sort_keys=True)
    for own in (plan["folder"], plan["scratch"]):
        text = text.replace(json.dumps(own)[1:-1], "")
    return hashlib.sha256(text.encode()).hexdigest()


def argv(plan: Mapping[str, Any], me: int, host: str, port: int) -> list[str]:
    """The launcher's argv with this node's values filled in, then the rank supervisor, then the command."""
    world = plan["world"]
    values = {
        "{node_rank}": str(me),
        "{master}": host,
        "{port}": str(port),
        "{endpoint}": f"{host}:{port}",
        "{ranks}": f"{_FOLDER}/ranks.py",
    }
    launcher = [values.get(word, word) for word in plan["launcher"]]
    rank = [sys.executable, *_SITE_PACKAGES_NOT_NEEDED, f"{_FOLDER}/rank.py"]
    return [*launcher, *rank, plan["folder"], str(world["size"]), world["nodes"][me]["name"], *plan["command"]]


def _record(
    plan: Mapping[str, Any], number: str, found: Finding, *, why: str, name: str = "", time: float | None = None
) -> None:
    """Record why node `number` failed; under another `name`, that it was lost and when."""
    log = f"{plan['folder']}/{run_folder.node_log(number)}"
    named: dict[str, Any] = {"node": found.node, "rank": found.rank, "code": found.code, "why": why}
    named |= {"log": log, "last_lines": files.tail(log)} | ({"lost": True, "time": time} if name else {})
    record.write(plan["folder"], name or f"node-{number}", **named)


if __name__ == "__main__":
    try:
        ended = main(sys.argv[1])
    except Exception as raised:  # a plan that cannot be read, or a folder in which no record can be left
        error = unexpected.error(raised)
        print(error, file=sys.stderr)
        ended = error.finding.code
    sys.exit(ended)
