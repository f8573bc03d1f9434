"""`dray diff`: what differs between two runs, with their losses and times."""

from __future__ import annotations

from collections.abc import Iterator

from dray.cli.args import Json, NamedRun, Runs
from dray.contract.findings import counted
from dray.runs import compare
from dray.runs.compare import Comparison, Difference, LossComparison
from dray.runs.store import find


def diff(a: NamedRun, b: NamedRun, as_json: Json = False, runs: Runs = None) -> None:
    """Show what differs between two runs, the most important first, and their losses and times side by side.

    The first RUN is A, the second B.

    dray diff 4711 4712
    """
    found = compare.runs(find(a, runs), find(b, runs))
    print(found.model_dump_json(indent=1) if as_json else "\n".join(text(found)))


def text(found: Comparison) -> Iterator[str]:
    """The differences, most important first; then losses and speed."""
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    yield "differences, A -> B, most important first:" if found.differences else "dray found no differences"
    yield from map(line, found.differences)
    yield from losses(found.losses)
    before, after = (curve.tokens_per_s for curve in found.curves)
    if before and after:
        yield f"median speed, A -> B: {before:,.0f} -> {after:,.0f} tokens/s ({after / before - 1:+.0%})"


def line(found: Difference) -> str:
    """The difference in a line of a list."""
    return f"  {found.kind}: {found.name}: {found.a} -> {found.b}"


def losses(found: LossComparison) -> Iterator[str]:
    """Lines that say whether losses are identical, and if not, where and how far they differ."""
    if not found.steps:
        yield "losses: no common step"
    elif found.first is None:
        yield f"losses are identical to the last bit in {counted(found.steps, 'step')}"
    else:
        a, b = compare.pair(found.first_a, found.first_b)
        yield f"losses first differ at step {found.first}: A {a}, B {b}"
    if found.largest:
        yield f"largest relative difference {found.largest:.1e}"
    for count, name in ((found.only_a, "A"), (found.only_b, "B")):
        if count:
            yield f"only {name} logged {counted(count, 'more step')}"
