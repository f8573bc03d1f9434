"""The report's sections on checkpoints, attempts with their failures, and start-up times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dray.contract.findings import counted
from dray.contract.start_times import NAMES
from dray.runs.metrics import Event, number
from dray.runs.report.data import Run, Try
from dray.runs.report.document import MISSING, Item, Span, Spans, Table, Text
from dray.runs.report.numbers import figure, per_run, seconds
from dray.runs.report.plots import curve
from dray.runs.stop import utc

_LISTED = 200
_NODES = 64


def checkpoints(runs: Sequence[Run]) -> Iterator[Item]:
    """How long checkpoints took, and how long training waited for them."""
    yield per_run("Checkpoints, and how long training waited for them", runs, (
        ("saved", lambda run: figure(len(_saved(run)))),
        ("not saved", lambda run: figure(len(run.trace.of("checkpoint")) - len(_saved(run)))),
        ("slowest, until complete", lambda run: seconds(max(map(_took, _saved(run)), default=None), "no checkpoint")),
        ("training waited", lambda run: seconds(run.trace.spent["checkpoint_s"] or None, "not at all")),
        ("share of training time", _share),
    ))  # fmt: skip
    if any(run.trace.spent["checkpoint_s"] for run in runs):
        yield curve(
            runs, "checkpoint_s", "Waiting for checkpoints", "seconds since the last logged step", from_zero=True
        )
    rows = [
        (*((run.name,) if len(runs) > 1 else ()), figure(number(one, "checkpoint")), str(one["attempt"]),
         "yes" if one.get("saved") is True else f"no: {str(one.get('why'))[:200]}", seconds(number(one, "seconds")))
        for run in runs for one in run.trace.of("checkpoint")
    ]  # fmt: skip
    if rows:
        head = (*(("run",) if len(runs) > 1 else ()), "step", "attempt", "saved", "took")
        rest = f" (the last {_LISTED} of {len(rows)})" if len(rows) > _LISTED else ""
        yield Table(f"Each checkpoint{rest}", head, tuple(rows[-_LISTED:]), folded=True)


def _saved(run: Run) -> list[Event]:
    return [one for one in run.trace.of("checkpoint") if one.get("saved") is True]


def _took(event: Event) -> float:
    return number(event, "seconds") or 0.0


def _share(run: Run) -> str:
    trained = sum(_trained(run, one)[1] - _trained(run, one)[0] for one in run.tries)
    return f"{run.trace.spent['checkpoint_s'] / trained:.1%}" if trained > 0 else MISSING


def attempts(runs: Sequence[Run]) -> Iterator[Item]:
    """The attempts as a time line and tables."""
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        begin = min((row[0].begin for one in run.tries if (row := _row(run, one))), default=None)
        if begin is not None:
            yield _time_line(run, f"Attempts{of}, from {utc(begin)}", begin)
        yield Table(f"Attempts{of}", ("attempt", "status", "nodes", "steps", "began", "ended", "lost training"), tuple(
            (f"attempt {one.number}", f"{one.status}{': ' + one.why[:200] if one.why else ''}",
             " ".join(one.hosts[:8]) or MISSING,
             f"{figure(one.steps[0])} to {figure(one.steps[1])}" if one.steps[1] is not None else "none",
             _clock(one.began), _clock(one.ended), seconds(one.lost_s or None, "nothing"))
            for one in run.tries
        ))  # fmt: skip
        failures = [(one.number, failed) for one in run.tries for failed in one.failures]
        if failures:
            rows = tuple((_clock(failed.time), f"attempt {n}", failed.why) for n, failed in failures[-_LISTED:])
            yield Table(f"First failures of attempts and restarts{of}", ("when", "attempt", "what failed"), rows)
        recoveries = [found for one in run.tries for found in one.recoveries]
        if recoveries:
            head = ("failure", "next step", "noticed within", "stop", "queue", "start", "load", "first step", "total")
            yield Table(f"Recoveries{of}", head, tuple(
                (found.why.partition("\n")[0][:200], figure(found.step), *map(seconds, (
                    found.detect_s, found.stop_s, found.queue_s, found.start_s, found.load_s, found.step_s,
                    found.total_s)))
                for found in recoveries[-_LISTED:]
            ))  # fmt: skip


def _clock(time: float) -> str:
    return utc(time).replace("T", " ").replace("Z", "") if 0 < time < 1e11 else "unknown"


def _trained(run: Run, one: Try) -> tuple[float, float]:
    """The times of the attempt's first and last logged step."""
    found = run.trace.steps.get(one.number, ({}, {}))
    begin, end = (number(event, "time") or 0.0 for event in found)
    return begin, max(begin, end)


def _row(run: Run, one: Try) -> list[Span]:
    """The attempt's spans: queue, start-up, training, and the time after the last step."""
    begin, end = _trained(run, one)
    queue = [part for part in one.startup if part.name == "queue"]
    rest = [part for part in one.startup if part.name != "queue"]
    spans = [Span(part.begin, part.end, "queue") for part in queue]
    spans += [Span(rest[0].begin, rest[-1].end, "start-up")] if rest else []
    spans += [Span(begin, end, "training")] if end > begin else []
    since = spans[-1].end if spans else one.began
    return [*spans, Span(since, one.ended, "ending" if begin else "running")] if one.ended > since > 0 else spans


def _time_line(run: Run, title: str, begin: float) -> Spans:
    rows, marks = [], []
    for place, one in enumerate(run.tries):
        rows.append((f"attempt {one.number}", tuple(
            Span(span.begin - begin, span.end - begin, span.name) for span in _row(run, one)
        )))  # fmt: skip
        marks += [(place, failed.time - begin, failed.why) for failed in one.failures if failed.time > begin]
        marks += [
            (place, time - begin, _happened(event))
            for kind in ("slow", "divergence")
            for event in run.trace.of(kind, one.number)
            if (time := number(event, "time")) and time > begin
        ]
    faults = counted(len(marks), "fault") if marks else "no fault"
    told = "; ".join(
        f"{name}: {', '.join(f'{span.name} {seconds(span.end - span.begin)}' for span in row)}" for name, row in rows
    )
    return Spans(title, tuple(rows), tuple(marks[:100]), f"{title}, {faults} marked. {told}.")


def _nodes(of: str, one: Try) -> Iterator[Table]:
    """A table of each node's start-up; of many nodes only the slowest."""
    if one.nodes is None or len(one.nodes.nodes) < 2:
        return
    found, shown = one.nodes.nodes, [name for name in NAMES if any(name in row for row in one.nodes.nodes.values())]
    rest = [name for name in one.nodes.slowest if name in NAMES]
    names = sorted(found, key=lambda node: -sum(found[node].get(part, 0.0) for part in rest))[:_NODES]
    kept = f": the {_NODES} slowest of {len(found)} nodes" if len(found) > _NODES else ""
    yield Table(f"Start-up of each node, {of}{kept}", ("node", *(NAMES[part] for part in shown)), tuple(
        (node, *(seconds(found[node].get(part), "") for part in shown)) for node in names
    ), folded=True)  # fmt: skip


def _happened(event: Event) -> str:
    if event.get("event") == "slow":
        return f"rank {figure(number(event, 'rank'))} on {str(event.get('node'))[:100]} is slow"
    return f"loss {str(event.get('kind'))[:40]} at step {figure(number(event, 'first_step'))}"


def _title(runs: Sequence[Run], run: Run, one: Try) -> str:
    """The attempt; of several runs the run too, whose name may be that of its one attempt."""
    if len(runs) == 1:
        return f"attempt {one.number}"
    return f"{run.name}, attempt {one.number}" if len(run.tries) > 1 else run.name


def startups(runs: Sequence[Run]) -> Iterator[Item]:
    """The parts of each start-up, as a time line and tables."""
    rows, table = [], []
    for run in runs:
        for one in run.tries:
            name = _title(runs, run, one)
            if one.startup:
                begin = one.startup[0].begin
                rows.append(
                    (name, tuple(Span(part.begin - begin, part.end - begin, part.name) for part in one.startup))
                )
                table += [(name, part.name, seconds(part.seconds)) for part in one.startup]
                table.append((name, "total", seconds(one.startup[-1].end - begin)))
    if not rows:
        yield Text("No start-up was measured.")
        return
    told = "; ".join(
        f"{name}: {', '.join(f'{span.name} {seconds(span.end - span.begin)}' for span in row)}" for name, row in rows
    )
    yield Spans("From the queue to the first step", tuple(rows[:48]), alt=f"From the queue to the first step. {told}.")
    yield Table("Parts of each start-up", ("attempt", "part", "took"), tuple(table[: _LISTED * 2]))
    yield Text(
        "The queue is measured by Slurm's clock, all other parts by the first node's clock. Waiting for other nodes is "
        "part of rendezvous, preflight, process groups, datasets and model, and first step. Parts that a run does not "
        "have, such as a queue or a preflight, are left out."
    )
    for run in runs:
        for one in run.tries:
            yield from _nodes(_title(runs, run, one), one)
    for run in runs:
        for one in run.tries:
            parts = one.preflight.get("seconds")
            if isinstance(parts, dict) and parts:
                yield Table(f"Preflight of {_title(runs, run, one)}", ("part", "took"), tuple(
                    (str(name)[:100], seconds(number(parts, name))) for name in [*parts][:50]
                ), folded=True)  # fmt: skip
