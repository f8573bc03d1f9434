"""The effect of two runs' differences: where their losses diverge, and how fast they were."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from dray.contract.findings import counted
from dray.runs.metrics import Metrics, number, whole
from dray.runs.store import RunPaths, reason, written

Losses = Mapping[int, float | None]
"""Loss by step; None: it was not finite."""


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
    """Seconds from the plan to the first logged step of the first attempt; None for a copied run."""
    warnings: list[str] = []


class Parting(BaseModel):
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

    @property
    def identical(self) -> bool:
        """Whether all losses of both are equal to the last bit."""
        return self.first is None and self.steps > 0 and not self.only_a and not self.only_b


class Effect(BaseModel):
    """Both runs, and how their losses diverge."""

    a: Curve
    b: Curve
    parting: Parting


def effect(a: Sequence[RunPaths], b: Sequence[RunPaths]) -> Effect:
    """Compare the attempts of two runs, each in order."""
    ours, theirs = curve(a), curve(b)
    return Effect(a=ours, b=theirs, parting=compare(ours.losses, theirs.losses))


def curve(attempts: Sequence[RunPaths]) -> Curve:
    """The losses and times that the attempts of a run logged."""
    losses, seconds, speeds, warnings = dict[int, float | None](), list[float](), list[float](), list[str]()
    start: float | None = None
    for paths in attempts:
        metrics, first = Metrics(paths.metrics), True
        try:
            for event in metrics:
                if event.get("event") != "step" or (step := whole(event, "step")) is None:
                    continue
                losses.pop(step, None)  # so that steps stay in the order of training
                losses[step] = number(event, "loss")
                time = number(event, "time")
                if start is None and time is not None and (planned := written(paths.plan)):
                    start = time - planned  # negative in a copy, whose files are newer
                if not first:  # the first line includes the time of the compiler
                    seconds += [value] if (value := number(event, "step_s")) is not None else []
                    speeds += [value] if (value := number(event, "tokens_per_s")) is not None else []
                first = False
        except OSError as error:
            warnings.append(f"{paths.metrics} cannot be read: {reason(error)}")
        warnings += metrics.warnings()
    return Curve(
        losses=losses, median_s=statistics.median(seconds) if seconds else None, p95_s=_share(seconds, 0.95),
        tokens_per_s=statistics.median(speeds) if speeds else None,
        start_s=round(start, 3) if start is not None and start >= 0 else None, warnings=warnings,
    )  # fmt: skip


def difference(a: float | None, b: float | None) -> float:
    """The relative difference of two losses, the same in both orders; infinite if one of them is not finite."""
    if a is None or b is None or not math.isfinite(a - b):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def compare(a: Losses, b: Losses, tolerance: float = 0.0) -> Parting:
    """The first step whose losses differ by more than the tolerance, and the largest difference."""
    common = sorted({*a} & {*b})
    differences = {step: difference(a[step], b[step]) for step in common}
    first = next((step for step in common if differences[step] > tolerance), None)
    finite = [(value, step) for step, value in differences.items() if 0 < value < math.inf]
    largest, largest_step = max(finite, default=(0.0, None))
    found = Parting(
        steps=len(common), first=first, largest=largest, largest_step=largest_step,
        only_a=len(a) - len(common), only_b=len(b) - len(common),
    )  # fmt: skip
    if first is not None:
        found.first_a, found.first_b = a[first], b[first]
    if common:
        found.last = common[-1]
        found.last_a, found.last_b = a[found.last], b[found.last]
    return found


def losses_text(found: Parting, a: str = "A", b: str = "B") -> list[str]:
    """Lines that say whether losses are identical, and if not, where and how far they differ."""
    if not found.steps:
        return [f"losses: no common step: {a} logged {found.only_a}, {b} logged {found.only_b}"]
    rest = [
        f"{counted(count, 'more step')} of {name} {'is' if count == 1 else 'are'} not in {other}"
        for count, name, other in ((found.only_a, a, b), (found.only_b, b, a))
        if count
    ]
    if found.first is None:
        line = f"all {found.steps} losses are identical to the last bit"
        return [line.replace("all 1 losses are", "the one loss is"), *rest]
    x, y = pair(found.first_a, found.first_b)
    lines = [f"losses first differ at step {found.first}: {x} and {y}"]
    if found.largest_step is not None:
        lines.append(f"largest relative difference {found.largest:.1e}, at step {found.largest_step}")
    if found.last is not None and found.last != found.first:
        x, y = pair(found.last_a, found.last_b)
        lines.append(f"at step {found.last}, the last common step: {x} and {y}")
    return [*lines, *rest]


def pair(a: float | None, b: float | None) -> tuple[str, str]:
    """Both values, with enough digits to see the difference."""
    if a is None or b is None:
        return tuple("not finite" if one is None else f"{one:.4g}" for one in (a, b))  # type: ignore[return-value]
    shown = ((f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in range(4, 17))
    return next((both for both in shown if both[0] != both[1] or a == b), (repr(a), repr(b)))


def _share(values: list[float], share: float) -> float | None:
    """The quantile: the smallest value that this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None
