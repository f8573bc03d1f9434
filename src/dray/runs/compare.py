"""Compare two runs: what differs between them, where their losses part, and how fast each was."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError
from dray.planning.schema import Plan
from dray.runs import capsule
from dray.runs.capsule import Capsule
from dray.runs.metrics import Metrics, number, whole
from dray.runs.store import RunPaths, attempts, newest_attempt, plan_of

# The keys of plan.json, and of what the capsule adds, of each kind of difference, most important kind first. A key in a
# table has the table's kind, unless it is named itself. A difference often causes those after it: another image has
# other versions.
_KEYS = {
    "image": "variant engine layer signers",
    "versions": "dray capsule.torch capsule.packages capsule.node.libc capsule.node.python",
    "code": "recipe.command recipe.accelerate capsule.source",
    "model": "recipe.model recipe.lora recipe.analog",
    "training": "recipe.train",
    "environment": "pass_env env",
    "nodes": "world site nodes capsule.node",
    "transport": "fabric annotations preflight capsule.preflight",
    "batch": "batch",
    "data": "recipe.data recipe.evaluate capsule.tokens",
    "seed": "recipe.train.seed",
    "launch": "recipe.launcher",
    "keeping": """
        recipe recipe.train.log_every recipe.train.eval_every recipe.train.profile recipe.train.trackers grace_s""",
    # These differ in every run, or another key shows them.
    "": """
        world.port world.master world.nodes world.spares world.identity world.task world.interfaces
        world.rendezvous_timeout_s world.max_restarts env.OMP_NUM_THREADS recipe.version recipe.name recipe.about
        recipe.scale recipe.tiny recipe.image recipe.image_digest recipe.image_signers recipe.adopted recipe.layer
        recipe.layer_digest recipe.env recipe.pass_env recipe.nodes recipe.ranks_per_node recipe.port recipe.batch
        recipe.preflight""",
}
_KIND = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
_ORDER = [*_KEYS]
_OF_NODES = (
    "cpu", "gpus", "driver", "threads", "cpus", "cores_of_ranks", "memory_gb", "numa", "kernel", "libc", "python",
)  # fmt: skip
ABSENT = "(none)"
_LONGEST = 100  # letters of a value

Losses = Mapping[int, float | None]
"""Loss by step; None: it was not finite."""


class Difference(BaseModel):
    """One difference between two runs."""

    kind: str
    name: str
    a: str
    b: str


class Curve(BaseModel):
    """One run's losses and speed, by its metrics."""

    losses: dict[int, float | None] = {}
    """Loss by step; if a later attempt repeated a step, the later loss. None: it was not finite."""
    tokens_per_s: float | None = None
    """The median over the logged steps, without the first of each attempt."""


class LossComparison(BaseModel):
    """How two runs' losses compare, at the steps that both logged."""

    steps: int
    first: int | None = None
    """The first step whose losses differ by more than the tolerance; without one, by a bit."""
    first_a: float | None = None
    first_b: float | None = None
    largest: float = 0.0
    """The largest relative difference of finite losses."""
    only_a: int = 0
    """Steps that only A logged."""
    only_b: int = 0


class Comparison(BaseModel):
    """Two runs, or attempts of them."""

    a: str
    """The folder of the run or the attempt."""
    b: str
    differences: list[Difference]
    """Most important first."""
    curves: tuple[Curve, Curve]
    losses: LossComparison


def runs(a: Path, b: Path) -> Comparison:
    """Compare two runs, or single attempts if their folders are given."""
    before, after = newest_attempt(a), newest_attempt(b)
    found = differences((plan_of(before), capsule.of(before)), (plan_of(after), capsule.of(after)))
    ours, theirs = curve(attempts_of(a)), curve(attempts_of(b))
    return Comparison(
        a=str(a.absolute()), b=str(b.absolute()), differences=found, curves=(ours, theirs),
        losses=compare(ours.losses, theirs.losses),
    )  # fmt: skip


def attempts_of(folder: Path) -> list[RunPaths]:
    """All attempts of a run, or the one attempt that was named."""
    newest = newest_attempt(folder)
    if folder.absolute() == newest.folder:
        return [newest]
    return [RunPaths(newest.run, attempt) for attempt in attempts(newest.run)]


# What differs.


def differences(a: tuple[Plan, Capsule], b: tuple[Plan, Capsule]) -> list[Difference]:
    """All differences, most important first."""
    ours, theirs = _capsule(a[1]), _capsule(b[1])
    found = list[Difference]()
    for key in ours:
        if ours[key] and theirs[key]:  # a run that has not started knows little
            found += _walk("", f"capsule.{key}", ours[key], theirs[key])
    found += _walk("", "", _plan(a[0]), _plan(b[0]))
    # Where an image is not hashed, as on a login node, its file tells it apart.
    name = "image_sha256" if a[0].image_sha256 and b[0].image_sha256 else "image"
    found += _walk("image", name, getattr(a[0], name), getattr(b[0], name))
    return sorted(found, key=lambda difference: _ORDER.index(difference.kind))


def _plan(plan: Plan) -> dict[str, Any]:
    """What the plan decides, without the paths in variables that differ in every run."""
    caches = f"{plan.run_folder.rpartition('/')[0]}/.cache-{plan.user.partition(':')[0]}"
    variables = {}
    for variable in plan.env:
        value = variable.value or ""
        for path, name in ((plan.run_folder, "RUN"), (plan.scratch, "SCRATCH"), (caches, "CACHES")):
            value = value.replace(path, name)
        variables[variable.name] = value
    return {
        "nodes": " ".join(node.name for node in plan.world.nodes),
        **plan.model_dump(mode="json"),
        "env": variables,
    }


def _capsule(made: Capsule) -> dict[str, Any]:
    """What nodes and trainer have told."""
    nodes = {}
    for name in _OF_NODES:
        values = {_text(getattr(node, name)) for node in made.nodes} - {ABSENT}
        if values:
            nodes[name] = ", ".join(sorted(values))
    packages = {name: version for node in made.nodes for name, version in node.packages.items() if name != "torch"}
    return {
        "torch": made.torch,
        "packages": packages,
        "source": made.source.model_dump(exclude={"folder", "branch"}) if made.source else {},
        "node": nodes,
        "preflight": re.sub(r", [\d.]+ GB/s of bus bandwidth.*", "", made.preflight or "", flags=re.DOTALL),
        "tokens": made.data,
    }


def _walk(kind: str, name: str, a: object, b: object) -> Iterator[Difference]:
    """The difference of two values; of two tables, the differences of their keys."""
    kind = _KIND.get(name, kind)
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _walk(kind, f"{name}.{key}" if name else key, a.get(key), b.get(key))
    elif kind and a != b:
        shown = printable(re.sub(r"^(recipe|capsule|env)\.", "", name))
        yield Difference(kind=kind, name=shown, a=_text(a), b=_text(b))


def _text(value: object) -> str:
    if value in (None, "", (), []):
        return ABSENT
    if isinstance(value, dict):
        return "given"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return " ".join(str(printable(text)).split())[:_LONGEST]


# What it came to.


def curve(run: Sequence[RunPaths]) -> Curve:
    """The losses and the speed that the attempts of a run logged, in their order."""
    losses, speeds = dict[int, float | None](), list[float]()
    for paths in run:
        steps = 0
        try:
            for event in Metrics(paths.metrics):
                step = whole(event, "step")
                if event.get("event") != "step" or step is None:
                    continue
                steps += 1
                losses[step] = number(event, "loss")
                if steps > 1:  # the first line includes the time of the compiler
                    speeds.append(number(event, "tokens_per_s") or 0.0)
        except OSError as error:
            raise ConfigError("the metrics cannot be read", where=paths.metrics, found=error.strerror) from error
    return Curve(losses=losses, tokens_per_s=statistics.median(speeds) if speeds else None)


def difference(a: float | None, b: float | None) -> float:
    """The relative difference of two losses, the same in both orders; infinite if one of them is not finite."""
    if a is None or b is None or not math.isfinite(a - b):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def compare(a: Losses, b: Losses, tolerance: float = 0.0) -> LossComparison:
    """The first step whose losses differ by more than the tolerance, and the largest difference."""
    common = sorted({*a} & {*b})
    found = LossComparison(steps=len(common), only_a=len(a) - len(common), only_b=len(b) - len(common))
    for step in common:
        apart = difference(a[step], b[step])
        if found.first is None and apart > tolerance:
            found.first, found.first_a, found.first_b = step, a[step], b[step]
        if apart < math.inf:
            found.largest = max(found.largest, apart)
    return found


def pair(a: float | None, b: float | None) -> tuple[str, str]:
    """Both values, with enough digits to see the difference."""
    for digits in range(4, 17):
        shown = _loss(a, digits), _loss(b, digits)
        if shown[0] != shown[1] or a == b:
            return shown
    return repr(a), repr(b)


def _loss(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"
