"""What the runner and a rank's supervisor cost over an empty Python: milliseconds, and the runner's memory.

    .venv/bin/python benchmarks/runner.py [OTHER_CHECKOUT]

Medians of interleaved runs; with another checkout, its own are beside them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 41


def main() -> None:
    """Time each in turn, so that a machine that slows down slows all of them."""
    checkouts = [Path(__file__).resolve().parents[1], *(Path(other).resolve() for other in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        commands = {name: command for checkout in checkouts for name, command in _commands(checkout, folder).items()}
        seconds: dict[tuple[str, Path], list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, (command, env) in commands.items():
                begun = time.perf_counter()
                subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  our own list
                seconds[name].append(time.perf_counter() - begun)
        memory = [_memory(checkout, folder) for checkout in checkouts]
    medians = {name: statistics.median(times) * 1000 for name, times in seconds.items()}
    for checkout, megabytes in zip(checkouts, memory, strict=True):
        found = {name: taken for (name, of), taken in medians.items() if of == checkout}
        print(checkout)
        print(f"  an empty python               {found['python']:6.1f} ms")
        print(f"  the runner, over it           {found['runner'] - found['python']:6.1f} ms, {megabytes}")
        print(f"  a rank's supervisor, in all   {found['rank']:6.1f} ms")


def _commands(checkout: Path, folder: str) -> dict[tuple[str, Path], tuple[list[str], dict[str, str]]]:
    env = {
        **os.environ,
        "N": "0",
        "NS": "1",
        "NN": "n",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "PYTHONPATH": f"{checkout}/src",
    }
    rank = [sys.executable, "-S", "-E", f"{checkout}/src/dray/runner/rank.py", folder, "1", "n", "true"]
    commands = {
        "python": [sys.executable, "-c", ""],
        "runner": [sys.executable, "-m", "dray.runner", _plan(folder, ["true", "{ranks}"])],
        "rank": rank,
    }
    return {(name, checkout): (command, env) for name, command in commands.items()}


def _plan(folder: str, launcher: list[str]) -> str:
    """{ranks} is the python launcher's: for its only rank no store starts beside the runner."""
    (Path(folder) / "logs").mkdir(exist_ok=True)
    world = {
        "nodes": [{"name": "n", "address": "n"}],
        "size": 1,
        "port": 0,
        "master": "127.0.0.1",
        "ranks_per_node": 1,
        "interfaces": [],
        "rendezvous_timeout_s": 60,
        "shared_folder": True,
        "max_restarts": 0,
        "cores": [],
        "identity": {"node": "N", "nodes": "NS", "name": "NN", "cpus": "NC", "image": "NI"},
    }
    launch = {
        "run": "r1",
        "attempt": 1,
        "variant": "cpu",
        "recipe": {"train": None, "hang_timeout_s": None, "pass_env": []},
        "folder": folder,
        "scratch": f"{folder}/own",
        "launcher": launcher,
        "command": ["true"],
        "where": folder,
        "preflight": None,
        "env": [],
        "pass_env": [],
    }
    plan = Path(folder) / f"plan-{launcher[0]}.json"
    plan.write_text(json.dumps({**launch, "world": world}))
    return str(plan)


def _memory(checkout: Path, folder: str) -> str:
    """Of the runner beside a launcher that runs; its own is private, the rest is shared with any other Python."""
    (_, env), *_ = _commands(checkout, folder).values()
    argv = [sys.executable, "-m", "dray.runner", _plan(folder, ["sh", "-c", "sleep 2", "{ranks}"])]
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL) as runner:  # noqa: S603  our own list
        time.sleep(1)
        status = Path(f"/proc/{runner.pid}/smaps_rollup").read_text()
        runner.wait()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in status.splitlines()[1:]}
    return f"{found['Rss']:.1f} MB resident, {found['Private_Clean'] + found['Private_Dirty']:.1f} MB of it private"


if __name__ == "__main__":
    main()
