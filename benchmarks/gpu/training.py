"""Runs of dray's own trainer from plan.json, which the planner has made: whole ones, and a look into a step."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from processes import Process, all_values, values

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"
PLACE = "/PLACE"
Changes = dict[str, Any]


class Here(NamedTuple):
    """This machine, and where runs go."""

    folder: str
    variant: str
    deadline: float

    @property
    def on_cpu(self) -> bool:
        return self.variant == "cpu"

    def log(self, name: str) -> Path:
        """Of a process."""
        return Path(self.folder, "logs", f"{name}.log")

    def limit(self, seconds: float) -> float:
        """No later than the end of the suite; a CPU may have much else to do."""
        return max(1.0, min(seconds * (10 if self.on_cpu else 1), self.deadline - time.monotonic()))


def environment(folder: str) -> dict[str, str]:
    """What the plan has all processes see."""
    plan = json.loads(_text(folder, "none"))
    return {one["name"]: one["value"] for one in plan["env"] if one["name"] not in ("HF_HOME", "OMP_NUM_THREADS")}


def _text(folder: str, name: str) -> str:
    text = (HERE / "plan.json").read_text(encoding="utf-8")
    places = {"PYTHON": sys.executable, "SCRATCH": f"{folder}/scratch", "RUN": f"{folder}/{name}"}
    for placeholder, path in places.items():
        text = text.replace(f"{PLACE}/{placeholder}", json.dumps(path)[1:-1])
    return text


def planned(here: Here, name: str, changes: Changes, ranks: int = 1) -> Path:
    """plan.json of this run, with settings of the recipe changed; `batch.*` is one rank's."""
    plan = json.loads(_text(here.folder, name))
    plan["variant"] = here.variant
    for key, value in changes.items():
        part, _, field = key.rpartition(".")
        owner = plan if not part else plan["batch"] if part == "batch" else plan["recipe"][part]
        if field not in owner:
            raise KeyError(f"{key}: the recipe has no such setting")
        owner[field] = value
    plan["batch"]["global_size"] = ranks * plan["batch"]["per_device"] * plan["batch"]["gradient_accumulation_steps"]
    plan["recipe"]["data"]["cache_dir"] = f"{here.folder}/tokens"
    folder = Path(plan["folder"])
    for path in (folder / "logs", folder / "failures"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan).replace("{plan}", f"{folder}/plan.json"))
    return folder / "plan.json"


class Run(NamedTuple):
    """What a run of the trainer left."""

    folder: Path
    log: str
    steps: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


def train(here: Here, name: str, changes: Changes, *, limit: float = 120) -> Run:
    """One run, whole: `python -m dray.train` without its start."""
    plan, log = planned(here, name, changes), here.log(name)
    list(values(_trained, str(plan), limit=here.limit(limit), log=log))
    return Run(plan.parents[1], log.read_text(errors="replace"), _steps(plan))


def train_two(here: Here, name: str, changes: Changes) -> Run:
    """One run of two ranks on this one device: each is the only rank of a node, so both take the first GPU."""
    plan, port, limit = planned(here, name, changes, ranks=2), _free_port(), here.limit(180)
    ranks = [
        Process(_trained, (str(plan), rank, 2, port), limit=limit, log=here.log(f"{name}-{rank}")) for rank in (0, 1)
    ]
    for ended in all_values(ranks):
        list(ended)
    return Run(plan.parents[1], here.log(f"{name}-0").read_text(errors="replace"), _steps(plan))


def look(here: Here, name: str, changes: Changes, function: Callable[..., Any], *more: Any, limit: float = 120) -> Any:  # noqa: ANN401
    """The trainer makes everything that it makes for a run, and in the place of its loop the function looks at that."""
    return next(looks(here, name, changes, _once, function, more, limit=limit))["value"]


def looks(
    here: Here, name: str, changes: Changes, function: Callable[..., Iterator[Any]], *more: Any, limit: float = 120  # noqa: ANN401
) -> Iterator[Any]:  # fmt: skip
    """As `look`, of a function that yields: a value is kept where it fails after it."""
    plan = planned(here, name, changes)
    return values(_looked, str(plan), function, more, limit=here.limit(limit), log=here.log(name))


def step(loop: Any, number: int, read: Any = None) -> None:  # noqa: ANN401  dray's Loop
    """One step alone, on what has been read for it or what is read now."""
    loop._step(number, *(read or loop._read(number))[:-1])


def _steps(plan: Path) -> list[dict[str, Any]]:
    lines = (plan.parent / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "step"]


def joined(rank: int = 0, world: int = 1, port: int = 0) -> None:
    """This process is that rank of its world, where the runner has not said so."""
    if "RANK" in os.environ:
        return
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or _free_port())}
    os.environ |= {**address, "DRAY_NODE_NAME": f"node{rank + 1}"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as the runner has it for one machine
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1"}
    if world > 1:
        os.environ["DRAY_BACKEND"] = "gloo"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def without_tensorboard() -> None:
    """A Python of somebody else's may lack it, and nobody reads it here."""
    from dray.train.loop import metrics  # noqa: PLC0415  not before the environment is set

    metrics.Trackers = Nothing


class Nothing:
    """Trackers."""

    def __init__(self, *_: object) -> None:
        """None."""

    def log(self, *_: object) -> None:
        """No."""

    def close(self) -> None:
        """No."""


def _trained(plan: str, rank: int = 0, world: int = 1, port: int = 0) -> Iterator[None]:
    from dray.train.__main__ import main  # noqa: PLC0415

    joined(rank, world, port)
    without_tensorboard()
    main(plan)
    yield None


class _Made(Exception):  # noqa: N818  it is a result
    """The trainer has made all that it trains with."""


def _once(loop: Any, function: Callable[..., Any], more: tuple[Any, ...]) -> Iterator[Any]:  # noqa: ANN401
    yield {"value": function(loop, *more)}


def _looked(plan: str, function: Callable[..., Iterator[Any]], more: tuple[Any, ...]) -> Iterator[Any]:
    from dray.train import __main__ as trainer  # noqa: PLC0415
    from dray.train.loop.loop import Loop  # noqa: PLC0415

    def run(loop: Any, evaluate: object) -> None:  # noqa: ANN401
        del evaluate
        raise _Made(loop)

    joined()
    without_tensorboard()
    original, Loop.run = Loop.run, run  # type: ignore[method-assign, assignment]
    try:
        trainer.main(plan)
    except _Made as made:
        Loop.run = original  # type: ignore[method-assign]
        yield from function(made.args[0], *more)


if __name__ == "__main__":  # as the runner's rank
    list(_trained(sys.argv[1]))
