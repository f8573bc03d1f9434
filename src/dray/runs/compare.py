"""Compare two runs: what differs between them, where their losses part, and how fast each was."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from dray.contract.control_characters import printable
from dray.contract.findings import counted
from dray.planning.schema import Plan
from dray.runs import capsule
from dray.runs.capsule import Capsule
from dray.runs.metrics import Metrics, number, whole
from dray.runs.store import RunPaths, attempts, newest_attempt, plan_of

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
_ORDER = [*_KEYS]
ABSENT = "(none)"
_OF_NODES = {
    "nodes": ("cpu", "gpus", "driver", "threads", "cpus", "cores_of_ranks", "memory_gb", "numa", "kernel"),
    "versions": ("libc", "python"),
}
_WIDE, _LONG = 48, 200  # letters of a value, in a table and in all

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
    step_s: float | None = None
    """Median seconds of a step."""
    tokens_per_s: float | None = None
    """The median over the logged steps."""


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


def runs(a: Path, b: Path) -> Comparison:
    """Compare two runs, or single attempts if their folders are given."""
    names, sides, curves = list[str](), list[tuple[Plan, Capsule]](), list[Curve]()
    for folder in (a, b):
        paths = newest_attempt(folder)
        plan = plan_of(paths)
        names.append(paths.run.name)
        sides.append((plan, capsule.of(paths, plan)))
        curves.append(curve(attempts_of(folder)))
    return Comparison(
        a=names[0], b=names[1], differences=differences(*sides), curves=(curves[0], curves[1]),
        losses=compare(curves[0].losses, curves[1].losses),
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
    found = [*_of_capsules(a[1], b[1]), *_of_plans(a[0], b[0])]
    return sorted(found, key=lambda difference: _ORDER.index(difference.kind))


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
        yield from _walk("versions", "", {**a.image.packages, "torch": ""}, {**b.image.packages, "torch": ""})
    ours, theirs = _seen(a), _seen(b)
    for (kind, name), value in ours.items():
        other = theirs.get((kind, name))
        if value is not None and other is not None:
            yield from _walk(kind, name, value, other)


def _seen(made: Capsule) -> dict[tuple[str, str], object]:
    """What the capsule knows, by kind and name; None: unknown."""
    known: dict[tuple[str, str], object] = {
        ("image", "inputs"): made.image.inputs or None,
        ("versions", "torch"): made.torch or None,
    }
    if made.source:
        diff = next((file.sha256 for file in made.files if file.path == "source.diff"), "")
        known["code", "commit"], known["code", "source.diff"] = made.source.commit, diff
        known["code", "untracked files"] = " ".join(made.source.untracked)
    for kind, names in _OF_NODES.items():
        for name in names:
            values = {_text(getattr(node, name)) for node in made.nodes} - {ABSENT}
            known[kind, name] = ", ".join(sorted(values)) or None
    if made.preflight:
        known["transport", "preflight"] = re.sub(r", [\d.]+ GB/s of bus bandwidth.*", "", made.preflight, flags=re.S)
    for name, sha256 in made.data.items():
        known["data", f"tokens of {name}"] = sha256
    return known


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
    return " ".join(str(printable(text)).split())[:_LONG]


# What it came to.


def curve(run: Sequence[RunPaths]) -> Curve:
    """The losses and the speed that the attempts of a run logged, in their order."""
    found, seconds, speeds = Curve(), list[float](), list[float]()
    for paths in run:
        is_first = True
        for event in Metrics(paths.metrics):
            step = whole(event, "step")
            if event.get("event") != "step" or step is None:
                continue
            found.losses[step] = number(event, "loss")
            if not is_first:  # the first line includes the time of the compiler
                seconds.append(number(event, "step_s") or 0.0)
                speeds.append(number(event, "tokens_per_s") or 0.0)
            is_first = False
    if seconds:
        found.step_s, found.tokens_per_s = statistics.median(seconds), statistics.median(speeds)
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
    for count, name in ((found.only_a, a), (found.only_b, b)):
        if count:
            lines.append(f"only {name} logged {counted(count, 'more step')}")
    return lines


def pair(a: float | None, b: float | None) -> tuple[str, str]:
    """Both values, with enough digits to see the difference."""
    if a is None or b is None:
        return _loss(a), _loss(b)
    for digits in range(4, 17):
        shown = (f"{a:.{digits}g}", f"{b:.{digits}g}")
        if shown[0] != shown[1] or a == b:
            return shown
    return repr(a), repr(b)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def text(found: Comparison) -> Iterator[str]:
    """The differences, most important first; then losses, times and speed."""
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    yield "differences, most important first:" if found.differences else "dray found no differences"
    kinds = max((len(one.kind) for one in found.differences), default=0)
    names = max((len(one.name) for one in found.differences), default=0)
    for one in found.differences:
        yield f"  {one.kind:<{kinds}}  {one.name:<{names}}  {_short(one.a)} -> {_short(one.b)}"
    yield from losses_text(found.losses)
    before, after = found.curves
    if before.step_s and after.step_s:
        change = after.step_s / before.step_s - 1
        yield f"median step: {before.step_s:.4g} -> {after.step_s:.4g} s ({change:+.0%})"
    if before.tokens_per_s and after.tokens_per_s:
        change = after.tokens_per_s / before.tokens_per_s - 1
        yield f"median speed: {before.tokens_per_s:,.0f} -> {after.tokens_per_s:,.0f} tokens/s ({change:+.0%})"


def _short(value: str) -> str:
    return value if len(value) <= _WIDE else f"{value[: _WIDE - 3]}..."
