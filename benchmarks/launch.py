"""What dray adds to each launcher, what planning costs, how long many nodes take to meet, and a node to check itself.

    .venv/bin/python benchmarks/launch.py [ROUNDS]

It wants torch, accelerate and deepspeed beside it. Each way starts two ranks on this machine, in turn.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dray import __version__, render
from dray.config import dray_home
from dray.config.site import Site
from dray.facts import Facts
from dray.planning.plan import plan
from dray.runs import local, prepare

# A rank writes when its first line ran, and when the ranks have added up their first tensor.
SCRIPT = """import os, time
line = time.time()
import torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.ones(4, requires_grad=True)
(weight * 2).sum().backward()
dist.all_reduce(weight.grad)
with open(f"{os.environ['MARKS']}/{os.environ['RANK']}", "w") as file:
    file.write(f"{line} {time.time()}")
dist.barrier()
os._exit(0)
"""
BARE = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port={port}"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--config_file={config}", "--num_machines=1", "--num_processes=2"),
        *("--machine_rank=0", "--main_process_port={port}", "--rdzv_backend=static"),
    ],
    "deepspeed": [
        *("-m", "deepspeed.launcher.runner", "--hostfile={hostfile}", "--no_ssh", "--node_rank=0", "--no_local_rank"),
        *("--master_addr=127.0.0.1", "--master_port={port}"),
    ],
}
# The runner, without the collectives of the preflight.
_RUNNER = """import sys
from dray.runner import __main__ as runner, preflight
preflight.Preflight.check_together = lambda *_: None
sys.exit(runner.main(sys.argv[1]))
"""
NODES = (2, 64, 1024, 9408)


def main() -> None:
    """All four."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        _launch(scratch, rounds)
        _plan()
        print(f"\n64 nodes meet: {_meet(scratch / 'met', 64):.2f} s with the start of as many Pythons")
        _check(scratch, rounds)


def _launch(scratch: Path, rounds: int) -> None:
    script = scratch / "script.py"
    script.write_text(SCRIPT)
    config, hostfile = scratch / "accelerate.yaml", scratch / "hostfile"
    config.write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU"}))
    hostfile.write_text("localhost slots=2\n")
    seen: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        for name, words in BARE.items():
            places = {"port": _port(), "config": config, "hostfile": hostfile}
            argv = [sys.executable, *(word.format(**places) for word in words), str(script)]
            seen.setdefault(name, []).append(_timed(scratch, argv, {"ACCELERATE_USE_CPU": "true"}))
        for name in (*BARE, "python"):
            argv, identity = _with_dray(scratch / f"{number}-{name}", script, name)
            seen.setdefault(f"dray {name}", []).append(_timed(scratch, argv, identity))
    lines, steps = ({name: statistics.median(one[i] for one in all_) for name, all_ in seen.items()} for i in (0, 1))
    print(f"two ranks, gloo, median of {rounds}, seconds (ratio to the bare launcher)")
    print(f"{'':<18} {'first line':>16} {'first step':>16}")
    for name in seen:
        bare = name.removeprefix("dray ").replace("python", "torchrun")
        shown = [f"{found[name]:6.2f} {found[name] / found[bare]:8.3f}x" for found in (lines, steps)]
        print(f"{name:<18} {shown[0]} {shown[1]}")


def _with_dray(runs: Path, script: Path, launcher: str) -> tuple[list[str], dict[str, str]]:
    recipe = prepare.read_recipe(None, [f"launcher={launcher}", "ranks_per_node=2"], [str(script)])
    facts = local.facts(recipe, engine="bare", image=sys.executable, nodes=1, gpus_per_node=0, site="generic")
    made, paths = prepare.write(recipe, facts, runs=runs)
    names = made.world.identity
    me = {names["node"]: "0", names["nodes"]: "1", names["name"]: "node1", names["cpus"]: str(os.cpu_count())}
    return ["bash", str(paths.node_script)], me


def _timed(scratch: Path, argv: list[str], more: Mapping[str, str]) -> tuple[float, float]:
    """From the start to rank 0's first line and first step; the slower rank counts for the step."""
    marks = scratch / "marks"
    marks.mkdir(exist_ok=True)
    env = {**os.environ, **more, "MARKS": str(marks), "OMP_NUM_THREADS": "1"}
    begun = time.time()
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)  # noqa: S603  our own list
    if ended.returncode != 0:
        sys.exit(f"{argv}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    told = [[float(word) - begun for word in (marks / str(rank)).read_text().split()] for rank in (0, 1)]
    return max(line for line, _ in told), max(step for _, step in told)


def _plan() -> None:
    site = Site(name="generic", about="")
    print("\nplanning and rendering, best of 5, milliseconds")
    for count in NODES:
        said = [f"batch.global_size={count * 8}"]
        recipe = prepare.read_recipe(dray_home.root() / "recipes" / "smoke-cpu.toml", said)
        facts = Facts(scheduler="slurm", nodelist=f"n[1-{count}]", nodes=count, engine="apptainer", image="/i.sif")
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            made = plan(recipe, site, facts, run_folder=PurePosixPath("/r"), scratch="/r/own", dray=__version__)
            render.node_script(made)
            made.model_dump_json(indent=1)
            seconds.append(time.perf_counter() - begun)
        print(f"{count:>6} nodes {min(seconds) * 1000:8.1f}")


def _check(scratch: Path, rounds: int) -> None:
    """What each node's look at itself adds to the launch of two, which do nothing else."""
    added = []
    for number in range(2 * rounds):
        taken = {
            on: _meet(scratch / f"{number}-{on}", 2, on=on) for on in sorted((False, True), reverse=number % 2 == 1)
        }
        added.append(taken[True] - taken[False])
    spread = f"{min(added) * 1000:.0f} to {max(added) * 1000:.0f}"
    print(
        f"\na node's own check adds {statistics.median(added) * 1000:.0f} ms, median of {len(added)} pairs ({spread})"
    )


def _meet(scratch: Path, count: int, *, on: bool = False) -> float:
    """Nodes that are processes here, so most of this is starting Pythons; `on`: they check themselves."""
    names = {"node": "N", "nodes": "NS", "name": "NN", "cpus": "NC", "image": "NI"}
    world = {
        "nodes": [{"name": f"n{number}", "address": "127.0.0.1"} for number in range(count)],
        "ranks_per_node": 1,
        "size": count,
        "master": "127.0.0.1",
        "port": 0,
        "interfaces": [],
        "max_restarts": 0,
        "rendezvous_timeout_s": 60,
        "cores": [],
        "one_machine": True,
        "shared_folder": True,
        "identity": names,
    }
    folder, path = scratch, scratch / "plan.json"
    (folder / "logs").mkdir(parents=True)
    (folder / "secret").write_text("5ec2e7" * 8)
    room = {"timeout_s": 60, "free_gb": 0.1, "shared_memory_gb": 0.01, "memory_gb": 0.1}
    launch = {"launcher": ["true"], "command": ["true"], "where": str(scratch), "preflight": room if on else None}
    launch |= {"variant": "cpu", "fabric": {"kind": "unknown"}, "env": [], "pass_env": []}
    path.write_text(
        json.dumps(
            {"run": "r1", "folder": str(folder), "scratch": f"{scratch}/own", "attempt": 1, **launch, "world": world}
        )
    )
    source = str(dray_home.root() / "src")
    begun = time.perf_counter()
    started = [
        subprocess.Popen(  # noqa: S603  our own list
            [sys.executable, "-S", "-c", _RUNNER, str(path)],
            env={**os.environ, "PYTHONPATH": source, "N": str(number), "NS": str(count), "NN": f"n{number}"},
            stdout=subprocess.DEVNULL,
        )
        for number in range(count)
    ]
    codes = {one.wait() for one in started}
    if codes != {0}:
        sys.exit(f"nodes ended with {codes}")
    return time.perf_counter() - begun


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
