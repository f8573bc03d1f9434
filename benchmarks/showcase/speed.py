"""Tokens a second of train.py under dray, and under torchrun in the same image, in turn on one node of the cluster.

    .venv/bin/python benchmarks/showcase/speed.py [PAIRS [STEPS]]

Two ranks. The script itself prints tokens a second for each ten steps; of a job their median counts, without the first
three lines. What counts is the median ratio, with the least and the greatest.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import closing

from job import IMAGE, STEP, Job, multinode, prepare

from dray.clients.docker import client
from dray.cluster.local import LocalCluster

WARMUP = 3  # lines


def main(pairs: int = 10, steps: int = 300) -> None:
    """A line for each pair, then the ratio."""
    torchrun = f"srun --cpus-per-task=2 apptainer exec {IMAGE} torchrun --nproc-per-node=2 train.py {steps}"
    cores = ["--ntasks-per-node=1", "--cpus-per-task=2"]
    ways = {
        "dray": multinode(1, "ranks_per_node=2", steps=steps, options=cores),
        "torchrun": ["--nodes=1", *cores, f"--wrap={torchrun}"],
    }
    ratios: list[float] = []
    with closing(client()) as engine:
        cluster = LocalCluster(engine)
        now = cluster.health()
        prepare(cluster, now.size.nodes if now else 2)
        for number in range(pairs):
            names = sorted(ways, reverse=number % 2 > 0)
            seen = {name: speed(Job(cluster, *ways[name]).end()) for name in names}
            ratios.append(seen["dray"] / seen["torchrun"])
            shown = ", ".join(f"{name} {seen[name]:,.0f}" for name in names)
            print(f"pair {number + 1}: {shown} tokens/s, ratio {ratios[-1]:.3f}", flush=True)
    print(f"ratio dray/torchrun: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def speed(output: str) -> float:
    """The median of a job's lines."""
    return statistics.median([float(found[3]) for found in STEP.finditer(output)][WARMUP:])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
