"""The sections of a report of one or several runs, and the page made of them."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dray.contract import gpus
from dray.contract.control_characters import printable
from dray.contract.findings import counted
from dray.contract.start_times import NAMES
from dray.runs import cost
from dray.runs.metrics import number
from dray.runs.report.data import Run, Try, sample
from dray.runs.report.plots import (
    MISSING,
    MOST,
    Lines,
    Series,
    Span,
    Table,
    TimeLine,
    colour,
    figure,
    reduced,
    seconds,
)
from dray.runs.result import who
from dray.runs.why import text


class Text(NamedTuple):
    """A paragraph."""

    text: str
    style: str = ""
    """`warning`, `failure` or empty."""
    kind: str = "text"


Item = Text | Table | Lines | TimeLine
Measures = dict[str, dict[str, str]]


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
    several = len(runs) > 1
    named = {run: f" of {run.name}" if several else "" for run in runs}
    measures = {run.name: _measures(run) for run in runs}
    sections = {"Comparison" if several else "Summary": [*_summary(runs, measures)]}
    if any(run.trace.columns["step"] for run in runs):
        sections |= {
            "Loss and learning rate": [*_loss(runs)],
            "Speed": [*_speed(runs, measures)],
            "Step time": [*_step_time(named)],
            "Profile": [item for run, of in named.items() for item in _profile(run, of)],
            "Memory": [*_memory(runs, measures)],
            "Checkpoints": [*_checkpoints(runs, measures)],
        }
    else:
        sections["Training"] = [Text("dray's trainer logged no step, so losses and speed are unknown.")]
    sections |= {
        "Attempts and faults": [item for run, of in named.items() for item in _attempts(run, of)],
        "Start-up": [*_start_up(runs)],
        "Settings": [
            Table(f"Each setting{of} with its reason", ("setting", "reason"), [*run.plan.reasons.items()], folded=True)
            if run.plan
            else Text(f"The plan{of} cannot be read.", "warning")
            for run, of in named.items()
        ],
        "How this report was made": [*_about(runs)],
    }
    lead = [_ended(run, measures[run.name], f"{run.name}: " if several else "") for run in runs]
    title = f"{len(runs)} runs compared" if several else runs[0].name
    return Document(title, lead, [(heading, items) for heading, items in sections.items() if items], made)


# Measures ----------------------------------------------------------------------------------------------------------


def _measures(run: Run) -> Measures:
    """What the tables with a column for each run show, by table."""
    trace, result, plan = run.trace, run.result, run.plan
    steps, losses = trace.columns["step"], trace.points("loss")[1]
    starts, spent = trace.of("start"), trace.spent
    reasons = plan.reasons if plan else {}
    on_cpu = bool(plan and plan.variant == "cpu")
    hosts = run.tries[-1].hosts
    planned = number(starts[-1], "steps") if starts else None
    device = next((str(one["device"])[:100] for one in starts if one.get("device")), "")
    gpu = gpus.find(device)
    slowest = next((one.nodes.tflops for one in reversed(run.tries) if one.nodes and one.nodes.tflops), None)
    peak = trace.peak("memory_gb")
    saves = trace.of("checkpoint")
    saved = [number(one, "seconds") or 0.0 for one in saves if one.get("saved") is True]
    trained = sum(one.trained[1] - one.trained[0] for one in run.tries)
    mfu = _percent(trace.median("mfu"))
    estimated = re.search(r"([0-9.]+) GB on each GPU", reasons.get("memory", ""))
    vendor, measured = MISSING, f"{MISSING}; python -m dray.checks measures it"
    if gpu and plan and plan.recipe.train:
        tflops = gpu.bf16 if plan.recipe.train.precision == "bf16" else gpu.fp16
        vendor = f"{tflops:g} TFLOP/s ({gpu.source})"
    elif on_cpu:
        vendor = measured = "no GPU"
    if slowest:
        measured = f"{slowest.s:.0f} TFLOP/s on the slowest GPU (on {slowest.node}), measured before the launch"
    memory = MISSING if peak is None else f"{peak:.2f} GB"
    ranks = (result and result.world_size) or (plan.world.size if plan else None)
    names = f"{counted(len(hosts), 'node')}: {' '.join(hosts[:12])}{' ...' * (len(hosts) > 12)}"
    summary = {
        "status": run.told.status,
        "attempts": str(run.told.attempt),
        "nodes": names if hosts else MISSING,
        "ranks": figure(ranks),
        "parameters": figure(trace.first("parameters")),
        "training": reasons.get("training", MISSING),
        "global batch": reasons.get("batch", MISSING),
        "steps": figure(steps[-1] if steps else None) + (f" of {planned:,.0f}" if steps and planned else ""),
        "loss, first and last": f"{figure(losses[0], 4)} to {figure(losses[-1], 4)}" if losses else MISSING,
        "perplexity, last evaluation": figure(result.perplexity if result else None, 2),
        "tokens/s, median": figure(trace.median("tokens_per_s")),
        "step, median": seconds(trace.median("step_s")),
        "MFU, median": mfu,
        "memory of rank 0, peak": memory,
        "waiting for data": seconds(spent["data_s"] or None, "not at all") if steps else MISSING,
        "waiting for checkpoints": seconds(spent["checkpoint_s"] or None, "not at all") if steps else MISSING,
        "cost, all attempts": cost.text(result.spent if result else None) or MISSING,
        "run folder": run.folder,
    }
    speed = {
        "MFU, median": mfu,
        "GPU": device or ("none: MFU is for GPUs" if on_cpu else MISSING),
        "vendor's peak": vendor,
        "measured peak": measured,
        "FLOPs per token": figure(trace.first("flops_per_token")),
    }
    of = " of the host's memory" if on_cpu else " of the GPU's memory"
    estimates = {
        "estimate": reasons.get("memory", MISSING),
        "peak of rank 0": memory if peak is None else memory + of,
        "peak / estimate": f"{peak / float(estimated[1]):.0%}" if peak and estimated else "not comparable",
    }
    checkpoints = {
        "saved": figure(len(saved)),
        "not saved": figure(len(saves) - len(saved)),
        "slowest, until complete": seconds(max(saved, default=None), "no checkpoint"),
        "training waited": seconds(spent["checkpoint_s"] or None, "not at all"),
        "share of training time": _percent(spent["checkpoint_s"] / trained if trained > 0 else None),
    }
    return {"summary": summary, "speed": speed, "memory": estimates, "checkpoints": checkpoints}


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"


def _per_run(caption: str, measures: dict[str, Measures], part: str) -> Table:
    """A table with a row for each measure and a column for each run."""
    columns = [found[part] for found in measures.values()]
    names = [*measures] if len(measures) > 1 else ["value"]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return Table(caption, ("measure", *names), rows)


# Sections ----------------------------------------------------------------------------------------------------------


def _ended(run: Run, measures: Measures, name: str) -> Text:
    told, found = run.told, measures["summary"]
    if told.cause:
        return Text(f"{name}{told.status}: {who(told.cause)}: {told.cause.why.partition(chr(10))[0]}", "failure")
    if told.status != "done":
        return Text(name + text(told).splitlines()[0].partition(": ")[2], "warning")
    losses = run.trace.points("loss")[1]
    if not losses:
        return Text(f"{name}done: exit code 0")
    tries = f" in {counted(told.attempt, 'attempt')}" if told.attempt > 1 else ""
    perplexity = found["perplexity, last evaluation"]
    evaluated = "" if perplexity == MISSING else f"perplexity {perplexity}, "
    return Text(
        f"{name}done: {found['steps']} steps{tries}, loss {figure(losses[0], 3)} to {figure(losses[-1], 3)}, "
        f"{evaluated}{found['tokens/s, median']} tokens/s, {found['ranks']} ranks on {found['nodes']}"
    )


def _summary(runs: Sequence[Run], measures: dict[str, Measures]) -> Iterator[Item]:
    table = _per_run("The runs compared" if len(runs) > 1 else "What ran, and how fast", measures, "summary")
    yield table._replace(rows=[row for row in table.rows if {*row[1:]} != {MISSING}])
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        if run.told.cause or run.told.status == "stopped":
            yield Text(f"{name}cause: {run.told.name}." + (f" Fix: {run.told.fix}" if run.told.fix else ""), "failure")
        yield from (Text(name + warning, "warning") for warning in run.warnings)


def _curve(runs: Sequence[Run], column: str, title: str, y: str, *, from_zero: bool = True) -> Lines | Text:
    """A metric of each run over its steps, with marks where a run resumed and where its loss jumped."""
    series: list[Series] = []
    marks: list[tuple[float, str]] = []
    for place, run in enumerate(runs):  # the place decides the colour, also where another run has no curve
        steps, values = run.trace.points(column)
        if values:
            series.append(Series(run.name, reduced(steps, values), colour(place)))
        name = f"{run.name}: " if len(runs) > 1 else ""
        for event in (*run.trace.of("start"), *run.trace.of("divergence")):
            if step := number(event, "first_step"):
                what = (
                    f"attempt {event['attempt']} resumed" if event["event"] == "start" else f"loss {event.get('kind')}"
                )
                marks.append((step, f"{name}{what} at step {step:,.0f}"))
    if not series:
        return Text(f"{title}: {MISSING}. metrics.jsonl has no steps.")
    return Lines(title, y, series, marks[:60], from_zero)


def _loss(runs: Sequence[Run]) -> Iterator[Item]:
    label = "loss, mean over all labels since the last logged step"
    yield _curve(runs, "loss", "Training loss", label, from_zero=False)
    series: list[Series] = []
    rows = []
    for run in runs:
        for dataset, events in run.trace.evals.items():
            points = [
                (float(step), loss) for step in sorted(events) if (loss := number(events[step], "loss")) is not None
            ]
            if points:
                name = f"{run.name}: {dataset}" if len(runs) > 1 else dataset
                step, loss = points[-1]
                last = events[int(step)]
                series.append(Series(name, points[-MOST:], colour(len(series))))
                rows.append((name, figure(step), figure(loss, 4), figure(number(last, "perplexity"), 2),
                             figure(number(last, "accuracy"), 4)))  # fmt: skip
    if any(len(one.points) > 1 for one in series):
        yield Lines("Evaluation loss", "loss", series[:24], dots=True)
    if rows:
        yield Table("The last evaluation of each dataset", ("dataset", "step", "loss", "perplexity", "accuracy"), rows)
    yield _curve(runs, "lr", "Learning rate", "learning rate")


def _speed(runs: Sequence[Run], measures: dict[str, Measures]) -> Iterator[Item]:
    yield _curve(runs, "tokens_per_s", "Tokens per second", "tokens/s, all ranks, since the last logged step")
    if any(run.trace.peak("mfu") for run in runs):
        yield _curve(runs, "mfu", "Model FLOPs utilization (MFU)", "MFU")
    yield Text(
        "MFU = tokens/s / ranks x FLOPs per token / the vendor's peak. FLOPs per token = 6 x weights in matrix "
        "products - 2 x frozen weights + 12 x layers x hidden size x sequence length. The peak is the vendor's figure "
        "for dense matrix products in the run's 16-bit type."
    )
    yield _per_run("Parts of MFU", measures, "speed")


def _step_time(named: dict[Run, str]) -> Iterator[Item]:
    yield _curve([*named], "step_s", "Seconds per step", "seconds, mean since the last logged step")
    whole = {run.name if of else "all steps": run.trace.points("step_s")[1] for run, of in named.items()}
    yield _quantiles("How long a step took", "run" if len(named) > 1 else "of", whole)
    for run, of in named.items():
        if run.trace.nodes:
            yield Text(
                "All ranks wait for one another in each step, so the step time is the same on all nodes. A node's own "
                "time is the forward pass and the wait for data of its slowest rank, without waiting for other ranks."
            )
            yield _quantiles(f"Own step time of each node{of}", "node", run.trace.nodes)
        elif run.trace.columns["step"]:
            yield Text(f"Own step time of each node{of}: {MISSING}. It needs several ranks and ddp, zero1 or zero2.")
        if slow := run.trace.of("slow"):
            yield Table(f"Slow ranks{of}", ("rank", "node", "times the median rank", "reported at step", "attempt"), [
                (f"rank {figure(number(one, 'rank'))}", str(one.get("node")), f"{number(one, 'times') or 0:.2f}",
                 figure(number(one, "step")), str(one["attempt"])) for one in slow
            ])  # fmt: skip
        elif run.trace.nodes:
            yield Text(f"No rank{of} was steadily slower than the others (1.25 times the median rank).")


def _quantiles(caption: str, head: str, named: Mapping[str, Sequence[float]]) -> Table:
    """A table of these times, the slowest first."""
    rows = []
    for name, values in named.items():
        if ordered := sample(values):
            median = statistics.median(ordered)
            at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.95, 0.99)]
            shown = (min(values), median, *at, max(values))
            rows.append((median, (name, f"{len(values):,}", *map(seconds, shown))))
    head_ = (head, "logged steps", "minimum", "median", "95 %", "99 %", "maximum")
    return Table(caption, head_, [row for _, row in sorted(rows, reverse=True)])


def _profile(run: Run, of: str) -> Iterator[Item]:
    """The longest kernels of the last attempt that profiled steps."""
    profile = next((one.profile for one in reversed(run.tries) if isinstance(one.profile.get("rows"), list)), None)
    if not profile:
        return
    kind = "operators" if profile.get("kind") == "operators" else "kernels"
    first, last = (figure(number(profile, key)) for key in ("first_step", "last_step"))
    yield Table(f"{kind} of steps {first} to {last}{of}", (kind[:-1], "calls", "total ms", "share"), [
        (str(row.get("name"))[:120], figure(number(row, "calls")), figure(number(row, "ms"), 3),
         _percent(number(row, "share"))) for row in profile["rows"][:20]
    ])  # fmt: skip
    where = "of the GPU" if kind == "kernels" else "of the CPU"
    total = figure(number(profile, "total_ms"), 2)
    yield Text(f"Rank 0 alone. All {kind} {where} took {total} ms. Trace, for ui.perfetto.dev: {profile['trace']}")


def _memory(runs: Sequence[Run], measures: dict[str, Measures]) -> Iterator[Item]:
    yield _per_run("Memory, estimated by the plan and measured", measures, "memory")
    if any(run.plan and run.plan.variant == "cpu" for run in runs):
        yield Text(
            "Without a GPU the peak is the memory of rank 0's process, including Python and torch. The estimate is for "
            "all ranks of a node and does not include these."
        )
    yield _curve(runs, "memory_gb", "Peak memory of rank 0", "GB")


def _checkpoints(runs: Sequence[Run], measures: dict[str, Measures]) -> Iterator[Item]:
    yield _per_run("Checkpoints, and how long training waited for them", measures, "checkpoints")
    if any(run.trace.spent["checkpoint_s"] for run in runs):
        yield _curve(runs, "checkpoint_s", "Waiting for checkpoints", "seconds since the last logged step")


def _attempts(run: Run, of: str) -> Iterator[Item]:
    """The attempts as a time line and tables."""
    phases = {f"attempt {one.number}": _phases(one) for one in run.tries}
    began = min((spans[0].begin for spans in phases.values() if spans), default=0.0)
    if began:
        rows = [(name, _from(began, spans)) for name, spans in phases.items()]
        yield TimeLine(f"Attempts{of}, from {_utc(began)}", rows)
    yield Table(f"Attempts{of}", ("attempt", "status", "nodes", "steps", "began", "ended"), [
        (f"attempt {one.number}", f"{one.status}: {one.why}" if one.why else one.status,
         " ".join(one.hosts[:8]) or MISSING,
         f"{figure(one.steps[0])} to {figure(one.steps[1])}" if one.steps[1] is not None else "none",
         _utc(one.began), _utc(one.ended))
        for one in run.tries
    ])  # fmt: skip
    failures = [(_utc(at), f"attempt {one.number}", what) for one in run.tries for at, what in one.failures]
    if failures:
        head = ("when", "attempt", "what failed")
        yield Table(f"First failures of attempts and restarts{of}", head, failures[-200:])


def _phases(one: Try) -> list[Span]:
    """The attempt's queue, start-up, training, and the time after the last step."""
    spans = [span for span in one.startup if span.name == "queue"]
    parts = [span for span in one.startup if span.name != "queue"]
    begin, end = one.trained
    if parts:
        spans.append(Span(parts[0].begin, parts[-1].end, "start-up"))
    if end > begin:
        spans.append(Span(begin, end, "training"))
    since = spans[-1].end if spans else one.began
    if one.ended > since > 0:
        spans.append(Span(since, one.ended, "ending" if begin else "running"))
    return spans


def _from(begin: float, spans: Sequence[Span]) -> list[Span]:
    """The spans in seconds from this time on."""
    return [Span(span.begin - begin, span.end - begin, span.name) for span in spans]


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if 0 < at < 1e11 else "unknown"


def _start_up(runs: Sequence[Run]) -> Iterator[Item]:
    """The parts of each start-up as a time line, and of each node in a table."""
    rows, tables = [], []
    for run in runs:
        for one in run.tries:
            name = f"attempt {one.number}"
            if len(runs) > 1:  # its name may be that of its one attempt
                name = f"{run.name}, {name}" if len(run.tries) > 1 else run.name
            if one.startup:
                rows.append((name, _from(one.startup[0].begin, one.startup)))
            nodes = one.nodes.nodes if one.nodes else {}
            if len(nodes) > 1:
                parts = [part for part in NAMES if any(part in row for row in nodes.values())]
                cells = [(node, *(seconds(row.get(part), "") for part in parts)) for node, row in nodes.items()]
                head = ("node", *(NAMES[part] for part in parts))
                tables.append(Table(f"Start-up of each node, {name}", head, cells, folded=True))
    if not rows:
        yield Text("No start-up was measured.")
        return
    yield TimeLine("From the queue to the first step", rows[:48])
    yield Text(
        "The queue is measured by Slurm's clock, all other parts by the first node's clock. Waiting for other nodes is "
        "part of rendezvous, preflight, process groups, datasets and model, and first step. Parts that a run does not "
        "have, such as a queue or a preflight, are left out."
    )
    yield from tables


def _about(runs: Sequence[Run]) -> Iterator[Item]:
    yield Text(
        f"A curve with more than {MOST:,} points is reduced to that number; each part keeps its lowest and its highest "
        "value. Sums use all logged steps; medians use 100,000 of them at most, evenly chosen. All times are UTC."
    )
    if again := sum(run.trace.again for run in runs):
        yield Text(f"{counted(again, 'logged step')} repeated after a resume: the curves show the last values.")
