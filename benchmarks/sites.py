"""What the preflight costs, how soon a silent fallback is said, and how long an environment's check takes.

    .venv/bin/python benchmarks/sites.py [ROUNDS]

The first two want the cluster (make cluster) and the cpu image; the last wants neither.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path, PurePosixPath

from dray.clients import docker
from dray.cluster.local import LocalCluster
from dray.config import dray_home
from dray.config.site import Site
from dray.facts import Facts
from dray.fitness import variables
from dray.planning.plan import plan
from dray.runs import prepare

SHORT = ["train.steps=2", "train.warmup_steps=0", "train.log_every=1"]
SUBMIT = """
job=$(sbatch --parsable --output=/shared/home/bench-%j.log "$@") || exit
busy="JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)"
while state=$(scontrol show job --oneliner "$job") && [[ $state =~ $busy ]]; do
  sleep 0.1
done
cat "/shared/home/bench-$job.log"
"""


def main() -> None:
    """All three."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    _environment()
    with closing(docker.client()) as client:
        cluster = LocalCluster(client)
        _preflight(cluster, rounds)
        _fallback(cluster)


def _environment() -> None:
    recipe = prepare.read_recipe(dray_home.root() / "recipes" / "smoke-cpu.toml")
    facts = Facts(scheduler="slurm", nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")
    made = plan(recipe, Site(name="s", about=""), facts, run_folder=PurePosixPath("/r"), scratch="/r/own", dray="0")
    names = sorted(variables.rules())[::3][:200]
    shell = dict.fromkeys([*names, *(f"{name}X" for name in names[:50]), *(f"OTHER_{n}" for n in range(50))], "1")
    variables.rules.cache_clear()
    began = time.perf_counter()
    found = variables.check(made, shell, {})
    first = time.perf_counter() - began
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        variables.check(made, shell, {})
        seconds.append(time.perf_counter() - began)
    print(
        f"{len(shell)} variables: {first * 1000:.1f} ms with the reading of the rules, then "
        f"{statistics.median(seconds) * 1000:.1f} ms; {len(found)} findings"
    )


def _job(cluster: LocalCluster, *words: str, site: str = "") -> tuple[float, Path]:
    began = time.monotonic()
    argv = ["bash", "-c", SUBMIT, "sbatch", f"--export=ALL,DRAY_SITE={site}", "slurm/multinode.sh"]
    said = cluster.exec([*argv, "recipes/smoke-cpu.toml", *SHORT, *words]).out
    took = time.monotonic() - began
    folder = next(line.split(" /shared/")[1] for line in said.splitlines() if line.startswith("run folder: "))
    return took, cluster.shared / folder / "attempt-1"


def _preflight(cluster: LocalCluster, rounds: int) -> None:
    took: dict[str, list[float]] = {"never": [], "always": []}
    parts: list[dict[str, float]] = []
    for _ in range(rounds):
        for when, seconds in took.items():
            one, folder = _job(cluster, f"preflight.when={when}")
            seconds.append(one)
            if when == "always":
                parts.append(json.loads((folder / "preflight/report.json").read_text())["seconds"])
    without, with_ = (statistics.median(seconds) for seconds in took.values())
    print(f"\ntwo nodes of two ranks, median of {rounds}: {without:.1f} s without, {with_:.1f} s with the preflight")
    for part in parts[0]:
        print(f"  {part:<14} {statistics.median(one[part] for one in parts):6.2f} s")


def _fallback(cluster: LocalCluster) -> None:
    file = cluster.shared / "home" / "bench site.toml"
    file.write_text('name = "b"\nabout = "b"\n[fabric]\nstrategy = "host"\nplugin = "/opt/none/librccl-net*.so"\n')
    took, folder = _job(cluster, site="/shared/home/bench site.toml")
    cause = json.loads((folder / "result.json").read_text())["cause"]
    print(f"\na plugin that is not there: {took:.1f} s from sbatch to the end, {cause['node']}: {cause['why']}")


if __name__ == "__main__":
    main()
