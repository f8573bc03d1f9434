"""A training script of a user's on the local cluster, through a wrong variable and a node that loses its power.

    make showcase                            (or: .venv/bin/python benchmarks/showcase [NODES [STEPS]])

It wants build/dray-cpu.sif. On three nodes a spare one takes over; on two the run goes on with the one that is left.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from job import ROOT, SCRIPT, STEP, Job, multinode, prepare

from dray.clients.docker import client
from dray.cluster.local import LocalCluster
from dray.contract.findings import DrayError

LOST, CUT_AT = "n2", 60
"""The node that loses its power, and after which step."""
_ENDED = re.compile(r"^(failed|stopped|done)\b", re.MULTILINE)


def main(nodes: int = 3, steps: int = 300) -> None:
    """All of it, in the order in which a user meets it."""
    began = time.monotonic()
    with closing(client()) as engine:
        cluster = LocalCluster(engine)
        prepare(cluster, nodes)
        print(f"{SCRIPT.relative_to(ROOT)} is plain torch, and resumes from its own checkpoint. It does not know dray.")
        wrong_variable(cluster, steps)
        run = lost_power(cluster, nodes, steps)
    dray("why", run)
    dray("report", run, "--out", ROOT / "build" / "showcase.html")
    print(f"\nthe showcase took {time.monotonic() - began:.0f} s")


def wrong_variable(cluster: LocalCluster, steps: int) -> None:
    """As it comes with the script of another cluster."""
    job = submit(cluster, multinode(2, "ranks_per_node=1", "env.GLOO_SOCKET_IFNAME=ib0", steps=steps))
    show(last_words(job.end()))


def lost_power(cluster: LocalCluster, nodes: int, steps: int) -> Path:
    """Without the variable; the run goes on, though a node loses its power."""
    spare = "spares=1" if nodes > 2 else "min_nodes=1"
    job = submit(cluster, multinode(nodes, "ranks_per_node=1", spare, steps=steps, options=["--no-kill"]))
    before = job.until(lambda output: last_step(output) >= CUT_AT)
    run = job.run()
    show(losses(before))
    machine = cluster.machine(LOST)
    print(f"\n{LOST} loses its power.\n", flush=True)
    machine.kill()
    cut = time.monotonic()
    try:
        job.until(lambda output: STEP.search(output[len(before) :].partition("\nrun folder:")[2]))
        seconds = time.monotonic() - cut
        output = job.end()
    finally:
        machine.start()
    show(last_words(output))
    show(losses(output[len(before) :]))
    print(f"\n{seconds:.0f} s from the loss of power to the next line of the script")
    if last_step(output) != steps:
        raise DrayError("the run did not come to its end", where=run, found=output[-2000:])
    return run


def submit(cluster: LocalCluster, words: list[str]) -> Job:
    """As a user does it, and shown."""
    print(f"\n$ {shlex.join(['sbatch', *words]).replace(f'{ROOT}/', '')}", flush=True)
    return Job(cluster, *words)


def last_step(output: str) -> int:
    """The last that the script has told."""
    steps = STEP.findall(output)
    return int(steps[-1][0]) if steps else 0


def last_words(output: str) -> str:
    """How its first attempt ended, as the job says it; without the end of a log, whose place it names."""
    ended = _ENDED.search(output)
    lines = output[ended.start() :].partition("\nrun folder:")[0].splitlines() if ended else []
    return "\n".join(line for line in lines if not line.lstrip().startswith(("|", "failing nodes:")))


def losses(output: str) -> str:
    """The first lines of the script, and the last."""
    lines = [found[0] for found in STEP.finditer(output)]
    return "\n".join(lines if len(lines) < 8 else [*lines[:4], "...", *lines[-2:]])


def show(text: str) -> None:
    """A part of a job's output."""
    print("".join(f"  {line}\n" for line in text.splitlines()), end="", flush=True)


def dray(verb: str, *words: object) -> None:
    """The command as a user types it."""
    argv = [verb, *map(str, words)]
    print(f"\n$ dray {shlex.join(argv).replace(f'{ROOT}/', '')}", flush=True)
    subprocess.run([sys.executable, "-m", "dray", *argv], check=True)  # noqa: S603  our own


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except DrayError as error:
        print(f"dray: {error}", file=sys.stderr)
        sys.exit(error.finding.code)
