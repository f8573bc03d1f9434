"""The effect of two runs' differences: where their losses diverge, and how fast they were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import ceil

from pydantic import BaseModel

from dray.contract.findings import counted
from dray.runs.metrics import Metrics, number, whole
from dray.runs.paths import RunPaths
from dray.runs.reading import reason, written


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
    """The first step whose losses are not equal to the last bit."""
    first_a: float | None = None
    first_b: float | None = None
    largest: float = 0.0
    """The largest relative difference."""
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
    return Effect(a=ours, b=theirs, parting=parting(ours, theirs))


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


def parting(a: Curve, b: Curve) -> Parting:
    """Compare the losses bit by bit: the first step that differs, and the largest difference."""
    common = sorted({*a.losses} & {*b.losses})
    pairs = [(step, a.losses[step], b.losses[step]) for step in common]
    other = next(((step, x, y) for step, x, y in pairs if x != y), (None, None, None))
    ratios = [(abs(x - y) / max(abs(x), abs(y)), step) for step, x, y in pairs if x and y and x != y]
    largest = max(ratios, default=(0.0, None))
    last = pairs[-1] if pairs else (None, None, None)
    return Parting(
        steps=len(common), first=other[0], first_a=other[1], first_b=other[2],
        largest=largest[0], largest_step=largest[1], last=last[0], last_a=last[1], last_b=last[2],
        only_a=len(a.losses) - len(common), only_b=len(b.losses) - len(common),
    )  # fmt: skip


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
    x, y = _pair(found.first_a, found.first_b)
    lines = [f"losses first differ at step {found.first}: {x} and {y}"]
    if found.largest_step is not None:
        lines.append(f"largest relative difference {found.largest:.1e}, at step {found.largest_step}")
    if found.last is not None and found.last != found.first:
        x, y = _pair(found.last_a, found.last_b)
        lines.append(f"at step {found.last}, the last common step: {x} and {y}")
    return [*lines, *rest]


def _pair(a: float | None, b: float | None) -> tuple[str, str]:
    """Both values, with enough digits to see the difference."""
    if a is None or b is None:
        return tuple("not finite" if one is None else f"{one:.4g}" for one in (a, b))  # type: ignore[return-value]
    shown = ((f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in range(4, 17))
    return next((pair for pair in shown if pair[0] != pair[1] or a == b), (repr(a), repr(b)))


def _share(values: list[float], share: float) -> float | None:
    """The quantile: the smallest value that this share of the values does not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None
