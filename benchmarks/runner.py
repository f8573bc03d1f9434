"""What the runner and a rank's keeper cost over an empty Python, in milliseconds: medians of interleaved runs.

python benchmarks/runner.py
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

from dray.runner import rank

ROUNDS = 41


def main() -> None:
    """Time each in turn, so that a machine that slows down slows all of them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        plan = Path(folder) / "plan.json"
        world = {
            "nodes": [{"name": "n", "address": "n"}],
            "size": 1,
            "port": 0,
            "master": "n",
            "ranks_per_node": 1,
            "interfaces": [],
            "cores": [],
            "identity": {"node": "N", "nodes": "NS", "name": "NN", "cpus": "NC", "image": "NI"},
        }
        said = {"folder": folder, "launcher": ["true"], "command": ["true"], "where": folder, "world": world}
        plan.write_text(json.dumps(said))
        commands = {
            "python": [sys.executable, "-c", ""],
            "runner": [sys.executable, "-m", "dray.runner", str(plan)],
            "bare keeper": [sys.executable, "-S", "-E", "-c", ""],
            "keeper": [sys.executable, "-S", "-E", str(rank.__file__), folder, "1", "n", "true"],
        }
        env = {**os.environ, "N": "0", "NS": "1", "NN": "n", "RANK": "0", "WORLD_SIZE": "1"}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                begun = time.perf_counter()
                subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  our own list
                seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(times) * 1000 for name, times in seconds.items()}
    print(f"an empty python           {medians['python']:6.1f} ms")
    print(f"the runner, over it       {medians['runner'] - medians['python']:6.1f} ms")
    print(f"a rank's keeper, in all   {medians['keeper']:6.1f} ms")


if __name__ == "__main__":
    main()
