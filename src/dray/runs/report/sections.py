"""The sections of a report of one or several runs, and the page made of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from operator import itemgetter
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dray.contract.control_characters import printable
from dray.contract.findings import counted, listed
from dray.contract.node_start import NAMES
from dray.runs import metrics
from dray.runs.metrics import Startup, number
from dray.runs.report.data import Run
from dray.runs.report.plots import (
    MISSING,
    MOST,
    Lines,
    Series,
    Span,
    Table,
    Text,
    TimeLine,
    colour,
    figure,
    reduced,
    seconds,
)
from dray.runs.report.why import text
from dray.runs.result import who

Item = Text | Table | Lines | TimeLine
_SINCE = "since the last logged step"
_PLOTS = {
    "loss": ("Training loss", f"loss, mean over all labels {_SINCE}"),
    "lr": ("Learning rate", "learning rate"),
    "tokens_per_s": ("Tokens per second", f"tokens/s, all ranks, {_SINCE}"),
    "mfu": ("Model FLOPs utilization (MFU)", "MFU, of the vendor's peak for 16-bit matrix products"),
    "step_s": ("Seconds per step", f"seconds, mean {_SINCE}"),
    "memory_gb": ("Peak memory of rank 0", "GB; without a GPU of the process, with Python and torch"),
    "checkpoint_s": ("Waiting for checkpoints", f"seconds {_SINCE}"),
}
_MADE = Text(
    f"A curve with more than {MOST:,} points is reduced: each part keeps its lowest and its highest value. Where a run "
    "repeated steps after a resume, curves show the last values. All times are UTC."
)


class Document(NamedTuple):
    """The whole report."""

    title: str
    lead: Sequence[Text]
    """How each run ended."""
    sections: Sequence[tuple[str, Sequence[Item]]]
    made: str


def page(document: Document) -> str:
    """The report as one HTML page. What a run folder says can only be text in it."""
    template = resources.files("dray.runs.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, finalize=_shown, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"figure": figure, "seconds": seconds}
    return environment.from_string(template).render(document._asdict())


def _shown(value: object) -> object:
    return value if isinstance(value, Markup) else printable(value)


def document(runs: Sequence[Run], made: str) -> Document:
    """The whole report."""
    if len({run.name for run in runs}) < len(runs):  # copies of a run; colours and legends go by name
        runs = [replace(run, name=run.folder) for run in runs]
    title = runs[0].name
    if len(runs) > 1:
        runs = [replace(run, prefix=f"{run.name}: ") for run in runs]
        title = f"{len(runs)} runs compared"

    def each(section: Callable[[Run], Iterator[Item]]) -> list[Item]:
        return [item for run in runs for item in section(run)]

    warnings = [Text(run.prefix + warning, "warning") for run in runs for warning in run.warnings]
    sections: dict[str, list[Item]] = {
        "Summary": [_measured(runs), *warnings],
        "Loss and learning rate": [*_curve(runs, "loss"), *_evaluations(runs), *_curve(runs, "lr")],
        "Speed": [*_curve(runs, "tokens_per_s"), *_curve(runs, "mfu")],
        "Step time": [*_curve(runs, "step_s"), *each(_step_times)],
        "Profile": each(_profile),
        "Memory": [*_curve(runs, "memory_gb")],
        "Checkpoints": [*_curve(runs, "checkpoint_s")],
        "Attempts and failures": each(_attempts),
        "Start-up": [*_start_up(runs)],
        "Settings": each(_settings),
        "How this report was made": [_MADE, *each(_left_out)],
    }
    return Document(title, [*map(_lead, runs)], [(name, items) for name, items in sections.items() if items], made)


def _lead(run: Run) -> Text:
    """How the run ended, in one line."""
    explained = run.explained
    if explained.cause:
        fix = f". Fix: {explained.fix}" if explained.fix else ""
        return Text(f"{run.prefix}{explained.status}: {who(explained.cause)}: {explained.cause.head}{fix}", "failure")
    style = "" if explained.status == "done" else "warning"
    return Text(run.prefix + text(explained).splitlines()[0].partition(": ")[2], style)


# Measures ----------------------------------------------------------------------------------------------------------


def _measured(runs: Sequence[Run]) -> Table:
    """A row for each measure that a run has, and a column for each run."""
    columns = [_measures(run) for run in runs]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    names = [run.name for run in runs] if len(runs) > 1 else ["value"]
    return Table("What ran, and how fast", ("measure", *names), [row for row in rows if {*row[1:]} != {MISSING}])


def _measures(run: Run) -> dict[str, str]:
    trace, last = run.trace, run.attempts[-1]
    result = last.result
    reasons = run.plan.reasons if run.plan else {}
    start = (trace.events["start"] or [{}])[-1]
    steps = max((last_step for _, last_step in trace.steps.values()), default=None)
    planned, losses = number(start, "steps"), trace.values("loss")
    ranks = (result and result.world_size) or (run.plan.world.size if run.plan else None)
    nodes = f"{counted(len(last.hosts), 'node')}: {listed(last.hosts, 12)}"
    slowest = last.startup.tflops
    saves = trace.events["checkpoint"]
    saved = [number(event, "seconds") or 0.0 for event in saves if event.get("saved") is True]
    mfu = trace.median("mfu")
    return {
        "status": run.explained.status,
        "attempts": str(run.explained.attempt),
        "nodes": nodes if last.hosts else MISSING,
        "ranks": figure(ranks),
        "GPU": str(start.get("device") or MISSING),
        "parameters": figure(number(start, "parameters")),
        "training": reasons.get("training", MISSING),
        "global batch": reasons.get("batch", MISSING),
        "steps": figure(steps) + (f" of {planned:,.0f}" if steps and planned else ""),
        "loss, first and last": f"{figure(losses[0], 4)} to {figure(losses[-1], 4)}" if losses else MISSING,
        "perplexity, last evaluation": figure(result.perplexity if result else None, 2),
        "tokens/s, median": figure(trace.median("tokens_per_s")),
        "step, median": seconds(trace.median("step_s")),
        "MFU, median": MISSING if mfu is None else f"{mfu:.1%}",
        "measured peak": f"{slowest.s:.0f} TFLOP/s on the slowest GPU (on {slowest.node})" if slowest else MISSING,
        "memory, estimated": reasons.get("memory", MISSING),
        "peak memory of rank 0, GB": figure(max(trace.values("memory_gb"), default=None), 2),
        "checkpoints": f"{len(saved)} of {len(saves)} saved, slowest {seconds(max(saved, default=None))}"
        if saves
        else MISSING,
        "waiting for checkpoints": seconds(trace.checkpoint_s or None),
        "waiting for data": seconds(trace.data_s or None),
        "cost, all attempts": metrics.cost_text(result.spent if result else None) or MISSING,
        "run folder": run.folder,
    }


# Sections ----------------------------------------------------------------------------------------------------------


def _curve(runs: Sequence[Run], name: str) -> Iterator[Lines]:
    """A metric of each run over its steps, with marks where a run resumed and where its loss jumped; if it has any."""
    series: list[Series] = []
    marks: list[tuple[float, str]] = []
    for place, run in enumerate(runs):  # the place decides the colour, also where another run has no curve
        if points := run.trace.curves[name]:
            series.append(Series(run.name, reduced(points), colour(place)))
        for event in run.trace.events["start"]:
            if step := number(event, "first_step"):
                marks.append((step, f"{run.prefix}attempt {event['attempt']} resumed at step {step:,.0f}"))
        for event in run.trace.events["divergence"]:
            if step := number(event, "first_step"):
                marks.append((step, f"{run.prefix}loss {event.get('kind')} at step {step:,.0f}"))
    if series:
        title, unit = _PLOTS[name]
        yield Lines(title, unit, series, marks, from_zero=name != "loss")


def _evaluations(runs: Sequence[Run]) -> Iterator[Item]:
    """The loss of each dataset as a curve, and its last evaluation in a table."""
    series: list[Series] = []
    rows = []
    for run in runs:
        for dataset, events in run.trace.evals.items():
            losses = {step: number(events[step], "loss") for step in sorted(events)}
            points = [(step, loss) for step, loss in losses.items() if loss is not None]
            if points:
                step, loss = points[-1]
                last = events[step]
                series.append(Series(run.prefix + dataset, reduced(points), colour(len(series))))
                measures = figure(number(last, "perplexity"), 2), figure(number(last, "accuracy"), 4)
                rows.append((run.prefix + dataset, figure(step), figure(loss, 4), *measures))
    if any(len(one.points) > 1 for one in series):
        yield Lines("Evaluation loss", "loss", series, dots=True)
    if rows:
        yield Table("The last evaluation of each dataset", ("dataset", "step", "loss", "perplexity", "accuracy"), rows)


def _step_times(run: Run) -> Iterator[Item]:
    """How long steps took, on each node, the slowest first."""
    trace = run.trace
    if not trace.steps:
        return
    rows = []
    for name, times in {"all nodes": trace.values("step_s"), **trace.nodes}.items():
        if ordered := sorted(times):
            rows.append((name, statistics.median(ordered), ordered[0], ordered[int(len(ordered) * 0.95)], ordered[-1]))
    rows.sort(key=itemgetter(1), reverse=True)
    head = ("node", "median", "minimum", "95 %", "maximum")
    yield Table(f"{run.prefix}Step time", head, [(name, *map(seconds, times)) for name, *times in rows])
    if trace.nodes:
        yield Text(
            "All ranks wait for one another in each step. A node's own time is the forward pass and the wait for data "
            "of its slowest rank, without waiting for other ranks."
        )


def _profile(run: Run) -> Iterator[Item]:
    """The longest kernels of the last attempt that profiled steps."""
    profile = next((attempt.profile for attempt in reversed(run.attempts) if attempt.profile.get("rows")), None)
    if not profile:
        return
    kind = str(profile.get("kind"))
    steps = f"steps {profile.get('first_step')} to {profile.get('last_step')}"
    yield Table(f"{run.prefix}{kind} of {steps}", (kind.removesuffix("s"), "calls", "total ms", "share"), [
        (str(row.get("name"))[:120], figure(number(row, "calls")), figure(number(row, "ms"), 3),
         f"{number(row, 'share') or 0:.1%}") for row in profile["rows"]
    ])  # fmt: skip
    yield Text(
        f"Rank 0 alone. All {kind} took {figure(number(profile, 'total_ms'), 2)} ms. "
        f"Trace, for ui.perfetto.dev: {profile['trace']}"
    )


def _attempts(run: Run) -> Iterator[Item]:
    """The attempts and their first failures."""
    rows = []
    failures = []
    for attempt in run.attempts:
        name, result, steps = f"attempt {attempt.number}", attempt.result, run.trace.steps.get(attempt.number)
        queue = attempt.startup.parts.get("queue")
        status, ended = "no result", ""
        if result:
            why = result.cause.head if result.cause else result.reason
            status = f"{result.status}: {why}" if why else result.status
            ended = result.finished
        logged = f"{steps[0]:,} to {steps[1]:,}" if steps else "none"
        nodes = listed(attempt.hosts, 8)
        rows.append((name, status, nodes, logged, seconds(queue, ""), attempt.began, ended))
        failures += [(at, name, why) for at, why in attempt.failures]
    head = ("attempt", "status", "nodes", "steps", "in the queue", "began", "ended")
    yield Table(f"{run.prefix}Attempts", head, rows)
    if failures:
        yield Table(
            f"{run.prefix}First failure of each attempt and restart", ("when", "attempt", "what failed"), failures
        )


def _start_up(runs: Sequence[Run]) -> Iterator[Item]:
    """The parts of each start as a time line, and of each node in a table."""
    rows = []
    tables = []
    for run in runs:
        for attempt in run.attempts:
            name = f"{run.prefix}attempt {attempt.number}"
            if spans := _spans(attempt.startup):
                rows.append((name, spans))
            if len(attempt.startup.nodes) > 1:
                tables.append(_node_starts(name, attempt.startup))
    if rows:
        yield TimeLine("From the start of the job to the first step", rows)
        yield Text(
            "By the first node's clock. Waiting for other nodes is part of rendezvous, preflight, process groups, "
            "datasets and model, and first step."
        )
    yield from tables


def _spans(startup: Startup) -> list[Span]:
    spans = []
    end = 0.0
    for part, took in startup.parts.items():
        if part != "queue":  # it may last hours: nothing else would be visible
            spans.append(Span(end, end + took, NAMES.get(part, part)))
            end += took
    return spans


def _node_starts(name: str, startup: Startup) -> Table:
    parts = [part for part in NAMES if any(part in row for row in startup.nodes.values())]
    rows = [(node, *(seconds(row.get(part), "") for part in parts)) for node, row in startup.nodes.items()]
    return Table(f"{name}: start-up of each node", ("node", *(NAMES[part] for part in parts)), rows, folded=True)


def _settings(run: Run) -> Iterator[Item]:
    if run.plan:
        yield Table(
            f"{run.prefix}Each setting with its reason", ("setting", "reason"), [*run.plan.reasons.items()], folded=True
        )


def _left_out(run: Run) -> Iterator[Text]:
    if run.trace.every > 1:
        yield Text(
            f"{run.prefix}metrics.jsonl is long: one step in {run.trace.every} was read, and each that waited for a "
            "checkpoint. Extremes between them are not shown."
        )
