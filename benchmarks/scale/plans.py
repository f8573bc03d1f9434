"""Planning and rendering for many nodes, and lists of nodes that are long or wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import PurePosixPath

from table import Row

from dray import __version__, render
from dray.config import dray_home
from dray.config.site import Site
from dray.contract.findings import DrayError
from dray.facts import Facts
from dray.hostlist import expand
from dray.planning.plan import plan
from dray.runs import prepare

LISTS = {
    "100,000 names": ",".join(f"host{number}x" for number in range(100_000)),
    "a range of 100,000": "n[1-100000]",
    "60,000 names and rubbish": ",".join(f"n{number}" for number in range(60_000)) + ",n[9-1]",
    "10^36 names": "n[1-1000000000000][1-1000000000000][1-1000000000000]",
}
TWICE = ",".join(["n7"] * 10_000)


def rows() -> list[Row]:
    """Seconds, best of three; what is refused is printed."""
    found = []
    for count in (2, 64, 1024, 10_000):
        took, _ = _timed(lambda count=count: _plan(f"n[1-{count}]", count))  # type: ignore[misc]
        found.append(Row("plan and render", count, took, "s", 1))
    for name, text in LISTS.items():
        took, answer = _timed(lambda text=text: expand(text))  # type: ignore[misc]
        print(f"{name}: {answer}")
        found.append(Row(f"host list: {name}", 0, took, "s", 1))
    took, answer = _timed(lambda: _plan(TWICE, 10_000))
    print(f"one name 10,000 times: {answer}")
    found.append(Row("plan: one name 10,000 times", 10_000, took, "s", 1))
    return found


def _plan(nodelist: str, count: int) -> None:
    recipe = prepare.read_recipe(dray_home.root() / "recipes" / "smoke-cpu.toml", [f"batch.global_size={count * 8}"])
    facts = Facts(scheduler="slurm", nodelist=nodelist, nodes=count, engine="apptainer", image="/i.sif")
    site = Site(name="generic", about="")
    made = plan(recipe, site, facts, run_folder=PurePosixPath("/r"), scratch="/r/own", dray=__version__)
    render.node_script(made)
    made.model_dump_json(indent=1)


def _timed(call: Callable[[], object]) -> tuple[float, str]:
    took, answer = [], "taken"
    for _ in range(3):
        begun = time.perf_counter()
        try:
            call()
        except DrayError as error:
            answer = " / ".join(str(error).splitlines()[:2])
        took.append(time.perf_counter() - begun)
    return min(took), answer
