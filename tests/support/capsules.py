"""Run folders as a run leaves them, for what reads capsules."""

from __future__ import annotations

import json
from pathlib import Path

from dray.facts import Facts
from dray.runs.store import RunPaths
from dray.runs.write import read_recipe, write
from helpers import ROOT

FACTS = Facts(scheduler="local", nodelist="n1", nodes=1, address="127.0.0.1", engine="bare", image="/python")
NODE = {
    "host": "n1", "cpu": "AMD EPYC 7763", "cpus": 128, "usable_cpus": "0-127", "cores_of_ranks": "0-3;4-7",
    "threads": 4, "numa": ["0-63", "64-127"], "memory_gb": 540.0, "kernel": "Linux 6.1.0", "libc": "glibc 2.36",
    "python": "3.11.2", "gpus": ["NVIDIA H100"], "driver": "580.65.06",
}  # fmt: skip


def begun(runs: Path, *words: str, run: str = "mine", beside: Path | None = None) -> RunPaths:
    return write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words), FACTS, runs=runs, run=run, beside=beside)[1]


def nodes(paths: RunPaths, **other: object) -> None:
    packages = {"packages": {"torch": "2.13.0", "numpy": "2.1.0"}}
    paths.nodes.mkdir(exist_ok=True)
    for number, name in enumerate(("n1", "n2")):
        told = {"node": number, "name": name, **NODE, **other, **(packages if number == 0 else {})}
        (paths.nodes / f"node-{number}.json").write_text(json.dumps(told))


def steps(paths: RunPaths, *losses: float, **start: object) -> None:
    events: list[dict] = [{"event": "start", "time": 1.0, "torch": "2.13.0", "data": {"train": "ab" * 32}, **start}]
    for step, loss in enumerate(losses, 1):
        events.append(
            {"event": "step", "time": 1.0 + step, "step": step, "loss": loss, "step_s": 0.5, "tokens_per_s": 9.0}
        )
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
