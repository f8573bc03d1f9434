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
from dray.contract.findings import counted
from dray.planning.schema import Plan
from dray.runs import capsule
from dray.runs.capsule import Capsule
from dray.runs.metrics import Metrics, number, whole
from dray.runs.paths import RunPaths, attempts, newest_attempt
from dray.runs.reading import reason, written
from dray.runs.write import read

# The keys of plan.json of each kind of difference, most important kind first. A key in a table has the table's kind,
# unless it is named itself. A difference often causes those after it: another image has other versions.
_KEYS = {
    "image": "variant engine image_sha256 layer signers",
    "versions": "dray",
    "code": "recipe.command recipe.accelerate",
    "model": "recipe.model recipe.lora recipe.analog",
    "training": "recipe.train",
    "environment": "pass_env",
    "nodes": "world",
    "transport": "fabric annotations preflight",
    "batch": "batch",
    "data": "recipe.data recipe.evaluate",
    "seed": "recipe.train.seed",
    "launch": "recipe.launcher",
    "keeping": """
        recipe recipe.train.log_every recipe.train.eval_every recipe.train.profile recipe.train.trackers grace_s""",
    # These differ in every run, or another key shows them.
    "": """
        world.port world.master world.nodes world.spares world.identity world.task world.interfaces
        world.rendezvous_timeout_s world.max_restarts recipe.version recipe.name recipe.about recipe.scale recipe.tiny
        recipe.image recipe.image_digest recipe.image_signers recipe.adopted recipe.layer recipe.layer_digest
        recipe.env recipe.pass_env recipe.nodes recipe.ranks_per_node recipe.port recipe.batch recipe.preflight""",
}
_KIND = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
KINDS = [*_KEYS]
ABSENT = "(none)"
_OF_NODES = ("cpu", "gpus", "driver", "threads", "cpus", "cores_of_ranks", "memory_gb", "numa", "kernel")
_OF_PYTHON = ("libc", "python")
_WIDE = 48
_LONGEST = 200

Losses = Mapping[int, float | None]
"""Loss by step; None: it was not finite."""


class Difference(BaseModel):
    """One difference between two runs."""

    kind: str
    name: str
    a: str
    b: str


class Curve(BaseModel):
    """One run's losses and times, by its metrics."""

    losses: dict[int, float | None] = {}
    """Loss by step; if a later attempt repeated a step, the later loss. None: it was not finite."""
    median_s: float | None = None
    """Median seconds of a step."""
    p95_s: float | None = None
    tokens_per_s: float | None = None
    """The median over the logged steps."""
    start_s: float | None = None
    """Seconds from the plan to the first logged step; None for a copied run."""
    warnings: list[str] = []


class LossComparison(BaseModel):
    """How two runs' losses compare, at the steps that both logged."""

    steps: int
    first: int | None = None
    """The first step whose losses differ by more than the tolerance; without one, by a bit."""
    first_a: float | None = None
    first_b: float | None = None
    largest: float = 0.0
    """The largest relative difference of finite losses."""
    largest_step: int | None = None
    last: int | None = None
    """The last common step."""
    last_a: float | None = None
    last_b: float | None = None
    only_a: int = 0
    """Steps that only A logged."""
    only_b: int = 0


class Comparison(BaseModel):
    """Two runs."""

    a: str
    b: str
    differences: list[Difference]
    """Most important first."""
    curves: tuple[Curve, Curve]
    losses: LossComparison
    notes: list[str] = []


def runs(a: Path, b: Path) -> Comparison:
    """Compare two runs, or single attempts if their folders are given."""
    newest = [newest_attempt(folder) for folder in (a, b)]
    plans = [read(paths) for paths in newest]
    capsules = [capsule.of(paths, plan) for paths, plan in zip(newest, plans, strict=True)]
    notes = [
        f"{paths.run.name} has no capsule: its versions and nodes are unknown"
        for paths in newest
        if not paths.capsule.exists()
    ]
    ours, theirs = curve(attempts_of(a)), curve(attempts_of(b))
    return Comparison(
        a=newest[0].run.name,
        b=newest[1].run.name,
        differences=differences((plans[0], capsules[0]), (plans[1], capsules[1])),
        curves=(ours, theirs),
        losses=compare(ours.losses, theirs.losses),
        notes=[*notes, *ours.warnings, *theirs.warnings],
    )


def attempts_of(folder: Path) -> list[RunPaths]:
    """All attempts of a run, or the one attempt that was named."""
    newest = newest_attempt(folder)
    if folder.absolute() == newest.folder:
        return [newest]
    return [RunPaths(newest.run, attempt) for attempt in attempts(newest.run)]


# What differs.


def differences(a: tuple[Plan, Capsule], b: tuple[Plan, Capsule]) -> list[Difference]:
    """All differences, most important first."""
    found = [*_of_capsules(a[1], b[1]), *_of_plans(a[0], b[0])]
    return sorted(found, key=lambda difference: KINDS.index(difference.kind))


def _of_plans(a: Plan, b: Plan) -> Iterator[Difference]:
    yield from _walk("environment", "", _environment(a), _environment(b))
    ours, theirs = _hosts(a), _hosts(b)
    if ours["nodes"] != theirs["nodes"]:
        del ours["names"], theirs["names"]
    yield from _walk("nodes", "", ours, theirs)
    without = {"env", "files", "reasons", "findings", "binds"}
    yield from _walk("", "", *(plan.model_dump(mode="json", exclude=without) for plan in (a, b)))
    if not (a.image_sha256 and b.image_sha256):
        yield from _walk("image", "image", a.image, b.image)


def _environment(plan: Plan) -> dict[str, str]:
    """The variables, without the paths that differ in every run."""
    caches = f"{plan.run_folder.rpartition('/')[0]}/.cache-{plan.user.partition(':')[0]}"
    variables = {}
    for variable in plan.env:
        value = variable.value or ""
        for path, name in ((plan.run_folder, "RUN"), (plan.scratch, "SCRATCH"), (caches, "CACHES")):
            value = value.replace(path, name)
        variables[variable.name] = value
    return variables


def _hosts(plan: Plan) -> dict[str, object]:
    return {
        "nodes": len(plan.world.nodes),
        "names": " ".join(node.name for node in plan.world.nodes),
        "started by": "Slurm" if plan.by_slurm else "dray run",
        "site": plan.site.removeprefix("site "),
    }


def _of_capsules(a: Capsule, b: Capsule) -> Iterator[Difference]:
    """Differences in what both capsules know; a run that has not started knows little."""
    if a.image.packages and b.image.packages:
        yield from _walk("versions", "", a.image.packages | _torch(a), b.image.packages | _torch(b))
    ours, theirs = _seen(a), _seen(b)
    for kind, values in ours.items():
        for name, value in values.items():
            if name in theirs[kind]:
                yield from _walk(kind, name, value, theirs[kind][name])


def _seen(made: Capsule) -> dict[str, dict[str, object]]:
    """What the capsule knows, by kind."""
    code: dict[str, object] = {}
    if made.source:
        diff = next((file.sha256 for file in made.files if file.path == "source.diff"), "")
        untracked = " ".join(made.source.untracked)
        code = {"commit": made.source.commit, "source.diff": diff, "untracked files": untracked}
    preflight = re.sub(r", [\d.]+ GB/s of bus bandwidth.*", "", made.preflight or "", flags=re.DOTALL)  # as measured
    return {
        "image": _known({"inputs": made.image.inputs}),
        "versions": _torch(made) | _of_nodes(made, _OF_PYTHON),
        "code": code,
        "nodes": _of_nodes(made, _OF_NODES),
        "transport": _known({"preflight": preflight}),
        "data": {f"tokens of {name}": sha256 for name, sha256 in made.data.items()},
    }


def _torch(made: Capsule) -> dict[str, Any]:
    return _known({"torch": made.torch})


def _of_nodes(made: Capsule, names: Sequence[str]) -> dict[str, Any]:
    """What all nodes have in common, or the different values."""
    found = {}
    for name in names:
        values = {_text(getattr(node, name)) for node in made.nodes} - {ABSENT}
        found[name] = ", ".join(sorted(values))
    return _known(found)


def _known(values: dict[str, str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _walk(kind: str, name: str, a: object, b: object) -> Iterator[Difference]:
    """The difference of two values; of two tables, the differences of their keys."""
    kind = _KIND.get(name, kind)
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _walk(kind, f"{name}.{key}" if name else key, a.get(key), b.get(key))
    elif kind and a != b:
        yield Difference(kind=kind, name=str(printable(name.removeprefix("recipe."))), a=_text(a), b=_text(b))


def _text(value: object) -> str:
    if value in (None, "", (), []):
        return ABSENT
    if isinstance(value, dict):
        return "given"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return " ".join(str(printable(text)).split())[:_LONGEST]


# What it came to.


def curve(run: Sequence[RunPaths]) -> Curve:
    """The losses and times that the attempts of a run logged, in their order."""
    found, seconds, speeds = Curve(), list[float](), list[float]()
    started: float | None = None
    for paths in run:
        metrics, is_first = Metrics(paths.metrics), True
        try:
            for event in metrics:
                if event.get("event") != "step" or (step := whole(event, "step")) is None:
                    continue
                found.losses.pop(step, None)  # so that steps stay in the order of training
                found.losses[step] = number(event, "loss")
                if not is_first:  # the first line includes the time of the compiler
                    seconds.append(number(event, "step_s") or 0.0)
                    speeds.append(number(event, "tokens_per_s") or 0.0)
                elif started is None:
                    started = (number(event, "time") or 0.0) - (written(paths.plan) or 0.0)
                is_first = False
        except OSError as error:
            found.warnings.append(f"{paths.metrics} cannot be read: {reason(error)}")
        found.warnings += metrics.warnings()
    if seconds:
        found.median_s = statistics.median(seconds)
        found.p95_s = sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]
        found.tokens_per_s = statistics.median(speeds)
    if started is not None and started >= 0:  # the files of a copy are newer
        found.start_s = round(started, 3)
    return found


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
        if found.largest < apart < math.inf:
            found.largest, found.largest_step = apart, step
    if common:
        found.last = common[-1]
        found.last_a, found.last_b = a[found.last], b[found.last]
    return found


def losses_text(found: LossComparison, a: str = "A", b: str = "B") -> list[str]:
    """Lines that say whether losses are identical, and if not, where and how far they differ."""
    if not found.steps:
        return [f"losses: no common step: {a} logged {found.only_a}, {b} logged {found.only_b}"]
    lines = []
    if found.first is None:
        lines.append(f"losses are identical to the last bit in {counted(found.steps, 'step')}")
    else:
        lines.append(f"losses first differ at step {found.first}: {' and '.join(pair(found.first_a, found.first_b))}")
        if found.largest_step is not None:
            lines.append(f"largest relative difference {found.largest:.1e}, at step {found.largest_step}")
        if found.last != found.first:
            last = " and ".join(pair(found.last_a, found.last_b))
            lines.append(f"at step {found.last}, the last common step: {last}")
    for count, name in ((found.only_a, a), (found.only_b, b)):
        if count:
            lines.append(f"only {name} logged {counted(count, 'more step')}")
    return lines


def pair(a: float | None, b: float | None) -> tuple[str, str]:
    """Both values, with enough digits to see the difference."""
    digits = 4
    while a is not None and b is not None and a != b and f"{a:.{digits}g}" == f"{b:.{digits}g}":
        digits += 1
    shown = ["not finite" if value is None else f"{value:.{digits}g}" for value in (a, b)]
    return shown[0], shown[1]


def text(found: Comparison) -> Iterator[str]:
    """The differences, most important first; then losses, times and speed."""
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    yield "differences, most important first:" if found.differences else "dray found no differences"
    kinds = max((len(one.kind) for one in found.differences), default=0)
    names = max((len(one.name) for one in found.differences), default=0)
    for one in found.differences:
        yield f"  {one.kind:<{kinds}}  {one.name:<{names}}  {_short(one.a)} -> {_short(one.b)}"
    yield from (f"note: {note}" for note in found.notes)
    yield from losses_text(found.losses)
    before, after = found.curves
    yield from _change("step, median", before.median_s, after.median_s, "s")
    yield from _change("step, p95", before.p95_s, after.p95_s, "s")
    yield from _change("speed", before.tokens_per_s, after.tokens_per_s, "tokens/s")
    yield from _change("start-up", before.start_s, after.start_s, "s")


def _change(name: str, before: float | None, after: float | None, unit: str) -> Iterator[str]:
    if before and after is not None:
        yield f"{name + ':':<14}{_figure(before)} -> {_figure(after)} {unit} ({after / before - 1:+.0%})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _short(value: str) -> str:
    return value if len(value) <= _WIDE else f"{value[: _WIDE - 3]}..."
