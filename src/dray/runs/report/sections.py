"""The sections of a report of one or several runs, and the page made of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
from dray.runs.metrics import Event, number
from dray.runs.report.data import Run, Try, sample
from dray.runs.report.plots import (
    MISSING,
    MOST,
    Plot,
    Series,
    Span,
    Table,
    curves,
    figure,
    seconds,
    time_line,
)
from dray.runs.result import who
from dray.runs.why import text

_ROWS = 200  # of a long table
_GPU, _HOST = " GB on each GPU: ", " GB on each node's host: "


class Text(NamedTuple):
    """A paragraph."""

    text: str
    style: str = ""
    """`warning`, `failure` or empty."""
    kind: str = "text"


Item = Text | Table | Plot
Section = tuple[str, list[Item]]


class Document(NamedTuple):
    """The whole report."""

    title: str
    lead: Sequence[Text]
    """How each run ended."""
    sections: Sequence[Section]
    made: str


def page(document: Document) -> str:
    """The report as one HTML page. What a run folder says can only be text in it."""
    template = resources.files("dray.runs.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, finalize=_shown, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(template).render(document._asdict())


def _shown(value: object) -> object:
    return value if isinstance(value, Markup) else printable(value)


def document(runs: Sequence[Run], made: str) -> Document:
    """The whole report."""
    if len({run.name for run in runs}) < len(runs):  # copies of a run; colours and legends go by name
        runs = [replace(run, name=run.folder) for run in runs]
    several = len(runs) > 1
    sections = {"Comparison" if several else "Summary": [*_summary(runs)]}
    if any(run.trace.columns["step"] for run in runs):
        sections |= {
            "Loss and learning rate": [*_loss(runs)],
            "Speed": [*_speed(runs)],
            "Step time": [*_step_time(runs)],
            "Profile": [item for run in runs for item in _profile(run, _of(runs, run))],
            "Memory": [*_memory(runs)],
            "Checkpoints": [*_checkpoints(runs)],
        }
    else:
        sections["Training"] = [Text("dray's trainer logged no step, so losses and speed are unknown.")]
    sections |= {
        "Attempts and faults": [item for run in runs for item in _attempts(run, _of(runs, run))],
        "Start-up": [*_start_up(runs)],
        "Settings": [_settings(run, _of(runs, run)) for run in runs],
        "How this report was made": [*_about(runs)],
    }
    lead = [_ended(run, f"{run.name}: " if several else "") for run in runs]
    title = f"{len(runs)} runs compared" if several else runs[0].name
    return Document(title, lead, [(heading, items) for heading, items in sections.items() if items], made)


def _of(runs: Sequence[Run], run: Run) -> str:
    return f" of {run.name}" if len(runs) > 1 else ""


def _per_run(caption: str, runs: Sequence[Run], rows: Sequence[tuple[str, Callable[[Run], str]]]) -> Table:
    """A table with a row for each measure and a column for each run."""
    names = [run.name for run in runs] if len(runs) > 1 else ["value"]
    return Table(caption, ("measure", *names), [(name, *(cell(run) for run in runs)) for name, cell in rows])


def _curve(runs: Sequence[Run], column: str, title: str, y: str, *, from_zero: bool = False) -> Plot | Text:
    """A metric of each run over its steps, with marks where a run resumed and where its loss jumped."""
    series, marks = [], []
    for run in runs:
        steps, values = run.trace.points(column)
        if values:
            series.append(Series(run.name, steps, values))
        name = f"{run.name}: " if len(runs) > 1 else ""
        for event in (*run.trace.of("start"), *run.trace.of("divergence")):
            if step := number(event, "first_step"):
                resumed = f"attempt {event['attempt']} resumed at step {step:,.0f}"
                marks.append((step, name + (resumed if event["event"] == "start" else _happened(event))))
    if not series:
        return Text(f"{title}: {MISSING}. metrics.jsonl has no steps.")
    # A run has the same colour in all plots, also where another run has no curve.
    return curves(title, y, series, marks=marks[:60], from_zero=from_zero, names=[run.name for run in runs])


# Summary -----------------------------------------------------------------------------------------------------------


def _ended(run: Run, name: str) -> Text:
    told, losses = run.told, run.trace.points("loss")[1]
    if told.status != "done":
        if told.cause:
            why = told.cause.why.partition("\n")[0][:400]
            return Text(f"{name}{told.status}: {who(told.cause)}: {why}", "failure")
        return Text(name + text(told).splitlines()[0].partition(": ")[2], "warning")
    if not losses:
        return Text(f"{name}done: exit code 0")
    parts = [f"done: {_steps(run)} steps" + (f" in {counted(told.attempt, 'attempt')}" if told.attempt > 1 else "")]
    parts.append(f"loss {figure(losses[0], 3)} to {figure(losses[-1], 3)}")
    if run.result and run.result.perplexity is not None:
        parts.append(f"perplexity {figure(run.result.perplexity, 2)}")
    parts += [f"{figure(run.trace.median('tokens_per_s'))} tokens/s", f"{_ranks(run)} ranks on {_hosts(run)}"]
    return Text(name + ", ".join(parts))


def _summary(runs: Sequence[Run]) -> Iterator[Item]:
    def loss(run: Run) -> str:
        values = run.trace.points("loss")[1]
        return f"{figure(values[0], 4)} to {figure(values[-1], 4)}" if values else MISSING

    def waited(run: Run, key: str) -> str:
        return seconds(run.trace.spent[key] or None, "not at all") if run.trace.columns["step"] else MISSING

    table = _per_run("The runs compared" if len(runs) > 1 else "What ran, and how fast", runs, (
        ("status", lambda run: run.told.status),
        ("attempts", lambda run: str(run.told.attempt)),
        ("nodes", _hosts),
        ("ranks", _ranks),
        ("parameters", lambda run: figure(run.trace.first("parameters"))),
        ("training", lambda run: _reason(run, "training")),
        ("global batch", lambda run: _reason(run, "batch")),
        ("steps", _steps),
        ("loss, first and last", loss),
        ("perplexity, last evaluation", lambda run: figure(run.result.perplexity if run.result else None, 2)),
        ("tokens/s, median", lambda run: figure(run.trace.median("tokens_per_s"))),
        ("step, median", lambda run: seconds(run.trace.median("step_s"))),
        ("MFU, median", _mfu),
        ("memory of rank 0, peak", _peak_memory),
        ("waiting for data", lambda run: waited(run, "data_s")),
        ("waiting for checkpoints", lambda run: waited(run, "checkpoint_s")),
        ("cost, all attempts", lambda run: cost.text(run.result.spent if run.result else None) or MISSING),
        ("run folder", lambda run: run.folder),
    ))  # fmt: skip
    yield table._replace(rows=[row for row in table.rows if {*row[1:]} != {MISSING}])
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        if run.told.cause or run.told.status == "stopped":
            yield Text(f"{name}cause: {run.told.name}." + (f" Fix: {run.told.fix}" if run.told.fix else ""), "failure")
        yield from (Text(name + warning, "warning") for warning in run.warnings)


def _reason(run: Run, key: str) -> str:
    return run.plan.reasons.get(key, MISSING) if run.plan else MISSING


def _steps(run: Run) -> str:
    """The steps taken, of the planned steps."""
    steps, starts = run.trace.columns["step"], run.trace.of("start")
    planned = number(starts[-1], "steps") if starts else None
    return figure(steps[-1] if steps else None) + (f" of {planned:,.0f}" if steps and planned else "")


def _ranks(run: Run) -> str:
    return figure((run.result and run.result.world_size) or (run.plan.world.size if run.plan else None))


def _hosts(run: Run) -> str:
    hosts = run.tries[-1].hosts
    return f"{counted(len(hosts), 'node')}: {' '.join(hosts[:12])}{' ...' * (len(hosts) > 12)}" if hosts else MISSING


def _mfu(run: Run) -> str:
    return _percent(run.trace.median("mfu"))


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"


def _peak_memory(run: Run) -> str:
    peak = run.trace.peak("memory_gb")
    return MISSING if peak is None else f"{peak:.2f} GB"


# Training ----------------------------------------------------------------------------------------------------------


def _loss(runs: Sequence[Run]) -> Iterator[Item]:
    yield _curve(runs, "loss", "Training loss", "loss, mean over all labels since the last logged step")
    several = len(runs) > 1
    series, rows = [], []
    for run in runs:
        for name, events in run.trace.evals.items():
            points = {step: loss for step in sorted(events) if (loss := number(events[step], "loss")) is not None}
            if points:
                last = max(points)
                series.append(Series(f"{run.name}: {name}" if several else name, [*points], [*points.values()]))
                rows.append((
                    name, *((run.name,) if several else ()), figure(last), figure(points[last], 4),
                    figure(number(events[last], "perplexity"), 2), figure(number(events[last], "accuracy"), 4),
                ))  # fmt: skip
    if any(len(one.steps) > 1 for one in series):
        yield curves("Evaluation loss", "loss", series[:24], "Loss", dots=True)
    if rows:
        head = ("dataset", *(("run",) if several else ()), "step", "loss", "perplexity", "accuracy")
        yield Table("The last evaluation of each dataset", head, rows[:_ROWS])
    yield _curve(runs, "lr", "Learning rate", "learning rate", from_zero=True)


def _speed(runs: Sequence[Run]) -> Iterator[Item]:
    label = "tokens/s, all ranks, since the last logged step"
    yield _curve(runs, "tokens_per_s", "Tokens per second", label, from_zero=True)
    if any(run.trace.median("mfu") for run in runs):
        yield _curve(runs, "mfu", "Model FLOPs utilization (MFU)", "MFU", from_zero=True)
    yield Text(
        "MFU = tokens/s / ranks x FLOPs per token / the vendor's peak. FLOPs per token = 6 x weights in matrix "
        "products - 2 x frozen weights + 12 x layers x hidden size x sequence length. The peak is the vendor's figure "
        "for dense matrix products in the run's 16-bit type."
    )
    yield _per_run("Parts of MFU", runs, (
        ("MFU, median", _mfu),
        ("GPU", lambda run: _device(run) or ("none: MFU is for GPUs" if _on_cpu(run) else MISSING)),
        ("vendor's peak", _vendor_peak),
        ("measured peak", _measured_peak),
        ("FLOPs per token", lambda run: figure(run.trace.first("flops_per_token"))),
    ))  # fmt: skip


def _device(run: Run) -> str:
    return next((str(one["device"])[:100] for one in run.trace.of("start") if one.get("device")), "")


def _on_cpu(run: Run) -> bool:
    return bool(run.plan and run.plan.variant == "cpu")


def _vendor_peak(run: Run) -> str:
    gpu, train = gpus.find(_device(run)), run.plan and run.plan.recipe.train
    if gpu is None or not train:
        return "no GPU" if _on_cpu(run) else MISSING
    return f"{gpu.bf16 if train.precision == 'bf16' else gpu.fp16:g} TFLOP/s ({gpu.source})"


def _measured_peak(run: Run) -> str:
    """The speed of the slowest GPU, measured before the launch of the last attempt that has it."""
    for one in reversed(run.tries):
        if one.nodes and one.nodes.tflops:
            slowest = one.nodes.tflops
            return f"{slowest.s:.0f} TFLOP/s on the slowest GPU (on {slowest.node}), measured before the launch"
    return "no GPU" if _on_cpu(run) else f"{MISSING}; python -m dray.checks measures it"


def _step_time(runs: Sequence[Run]) -> Iterator[Item]:
    yield _curve(runs, "step_s", "Seconds per step", "seconds, mean since the last logged step", from_zero=True)
    several = len(runs) > 1
    named = [(run.name if several else "all steps", run.trace.points("step_s")[1]) for run in runs]
    yield _quantiles("How long a step took", "run" if several else "of", named)
    for run in runs:
        of = _of(runs, run)
        if run.trace.nodes:
            yield Text(
                "All ranks wait for one another in each step, so the step time is the same on all nodes. A node's own "
                "time is the forward pass and the wait for data of its slowest rank, without waiting for other ranks."
            )
            slowest = sorted(run.trace.nodes.items(), key=lambda one: -statistics.median(sample(one[1])))
            yield _quantiles(f"Own step time of each node{of}", "node", slowest)
        elif run.trace.columns["step"]:
            yield Text(f"Own step time of each node{of}: {MISSING}. It needs several ranks and ddp, zero1 or zero2.")
        if slow := run.trace.of("slow"):
            yield Table(f"Slow ranks{of}", ("rank", "node", "times the median rank", "reported at step", "attempt"), [
                (f"rank {figure(number(one, 'rank'))}", str(one.get("node")), f"{number(one, 'times') or 0:.2f}",
                 figure(number(one, "step")), str(one["attempt"])) for one in slow
            ])  # fmt: skip
        elif run.trace.nodes:
            yield Text(f"No rank{of} was steadily slower than the others (1.25 times the median rank).")


def _quantiles(caption: str, head: str, named: Sequence[tuple[str, Sequence[float]]]) -> Table:
    rows = []
    for name, values in named:
        ordered = sample(values)
        if ordered:
            at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.95, 0.99)]
            shown = (min(values), statistics.median(ordered), *at, max(values))
            rows.append((name, f"{len(values):,}", *map(seconds, shown)))
    return Table(caption, (head, "logged steps", "minimum", "median", "95 %", "99 %", "maximum"), rows)


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


def _memory(runs: Sequence[Run]) -> Iterator[Item]:
    def estimate(run: Run, where: str) -> tuple[str, str]:
        """The estimate's size in GB, and its parts."""
        for line in _reason(run, "memory").splitlines():
            size, found, parts = line.partition(where)
            if found:
                return size, parts
        return "", ""

    def size(run: Run, where: str) -> str:
        found = estimate(run, where)[0]
        return f"{float(found):.1f} GB" if found else "none"

    def peak(run: Run) -> str:
        of = " of the host's memory" if _on_cpu(run) else " of the GPU's memory"
        return _peak_memory(run) + (of if run.plan and run.trace.peak("memory_gb") is not None else "")

    def ratio(run: Run) -> str:
        measured, found = run.trace.peak("memory_gb"), estimate(run, _GPU)[0]
        return f"{measured / float(found):.0%}" if measured is not None and found else "not comparable"

    yield _per_run("Memory, estimated by the plan and measured", runs, (
        ("estimate, on each GPU", lambda run: size(run, _GPU)),
        ("its parts", lambda run: estimate(run, _GPU)[1] or "none"),
        ("estimate, on each node's host", lambda run: size(run, _HOST)),
        ("its parts, on the host", lambda run: estimate(run, _HOST)[1] or "none"),
        ("peak of rank 0", peak),
        ("peak / estimate", ratio),
    ))  # fmt: skip
    if any(map(_on_cpu, runs)):
        yield Text(
            "Without a GPU the peak is the memory of rank 0's process, including Python and torch. The estimate is for "
            "all ranks of a node and does not include these."
        )
    yield _curve(runs, "memory_gb", "Peak memory of rank 0", "GB", from_zero=True)


def _checkpoints(runs: Sequence[Run]) -> Iterator[Item]:
    def saved(run: Run) -> list[Event]:
        return [one for one in run.trace.of("checkpoint") if one.get("saved") is True]

    def share(run: Run) -> str:
        trained = sum(one.trained[1] - one.trained[0] for one in run.tries)
        return _percent(run.trace.spent["checkpoint_s"] / trained if trained > 0 else None)

    def slowest(run: Run) -> str:
        return seconds(max((number(one, "seconds") or 0.0 for one in saved(run)), default=None), "no checkpoint")

    yield _per_run("Checkpoints, and how long training waited for them", runs, (
        ("saved", lambda run: figure(len(saved(run)))),
        ("not saved", lambda run: figure(len(run.trace.of("checkpoint")) - len(saved(run)))),
        ("slowest, until complete", slowest),
        ("training waited", lambda run: seconds(run.trace.spent["checkpoint_s"] or None, "not at all")),
        ("share of training time", share),
    ))  # fmt: skip
    if any(run.trace.spent["checkpoint_s"] for run in runs):
        label = "seconds since the last logged step"
        yield _curve(runs, "checkpoint_s", "Waiting for checkpoints", label, from_zero=True)
    several = len(runs) > 1
    rows = [
        (*((run.name,) if several else ()), figure(number(one, "checkpoint")), str(one["attempt"]),
         "yes" if one.get("saved") is True else f"no: {one.get('why')}", seconds(number(one, "seconds")))
        for run in runs for one in run.trace.of("checkpoint")
    ]  # fmt: skip
    if rows:
        head = (*(("run",) if several else ()), "step", "attempt", "saved", "took")
        yield Table("Each checkpoint", head, rows[-_ROWS:], folded=True)


# Attempts ----------------------------------------------------------------------------------------------------------


def _attempts(run: Run, of: str) -> Iterator[Item]:
    """The attempts as a time line and tables."""
    phases = [(one, _phases(one)) for one in run.tries]
    began = min((spans[0].begin for _, spans in phases if spans), default=None)
    if began is not None:
        rows, marks = [], []
        for place, (one, spans) in enumerate(phases):
            rows.append((f"attempt {one.number}", [Span(a - began, b - began, name) for a, b, name in spans]))
            events = [*run.trace.of("slow", one.number), *run.trace.of("divergence", one.number)]
            happened = [*one.failures, *((number(event, "time") or 0.0, _happened(event)) for event in events)]
            marks += [(place, at - began, what) for at, what in happened if at > began]
        told = f", {counted(len(marks), 'fault') if marks else 'no fault'} marked"
        yield time_line(f"Attempts{of}, from {_utc(began)}", rows, marks[:100], told)
    yield Table(f"Attempts{of}", ("attempt", "status", "nodes", "steps", "began", "ended", "lost training"), [
        (f"attempt {one.number}", f"{one.status}: {one.why}" if one.why else one.status,
         " ".join(one.hosts[:8]) or MISSING,
         f"{figure(one.steps[0])} to {figure(one.steps[1])}" if one.steps[1] is not None else "none",
         _utc(one.began), _utc(one.ended), seconds(one.lost_s or None, "nothing"))
        for one in run.tries
    ])  # fmt: skip
    failures = [(_utc(at), f"attempt {one.number}", what) for one in run.tries for at, what in one.failures]
    if failures:
        caption = f"First failures of attempts and restarts{of}"
        yield Table(caption, ("when", "attempt", "what failed"), failures[-_ROWS:])
    recoveries = [found for one in run.tries if one.result for found in one.result.recoveries]
    if recoveries:
        head = ("failure", "next step", "noticed within", "stop", "queue", "start", "load", "first step", "total")
        yield Table(f"Recoveries{of}", head, [
            (one.why.partition("\n")[0][:200], figure(one.step), *map(seconds, (
                one.detect_s, one.stop_s, one.queue_s, one.start_s, one.load_s, one.step_s, one.total_s)))
            for one in recoveries[-_ROWS:]
        ])  # fmt: skip


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


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if 0 < at < 1e11 else "unknown"


def _happened(event: Event) -> str:
    if event.get("event") == "slow":
        return f"rank {figure(number(event, 'rank'))} on {str(event.get('node'))[:100]} is slow"
    return f"loss {str(event.get('kind'))[:40]} at step {figure(number(event, 'first_step'))}"


def _start_up(runs: Sequence[Run]) -> Iterator[Item]:
    """The parts of each start-up, as a time line and tables."""
    rows, table, nodes = [], [], []
    for run in runs:
        for one in run.tries:
            name = f"attempt {one.number}"
            if len(runs) > 1:  # its name may be that of its one attempt
                name = f"{run.name}, {name}" if len(run.tries) > 1 else run.name
            if one.startup:
                begin = one.startup[0].begin
                spans = [Span(a - begin, b - begin, part) for a, b, part in one.startup]
                rows.append((name, spans))
                table += [(name, span.name, seconds(span.end - span.begin)) for span in spans]
                table.append((name, "total", seconds(spans[-1].end)))
            if one.nodes and len(one.nodes.nodes) > 1:
                parts = [part for part in NAMES if any(part in row for row in one.nodes.nodes.values())]
                nodes.append(Table(f"Start-up of each node, {name}", ("node", *(NAMES[part] for part in parts)), [
                    (node, *(seconds(row.get(part), "") for part in parts)) for node, row in one.nodes.nodes.items()
                ], folded=True))  # fmt: skip
    if not rows:
        yield Text("No start-up was measured.")
        return
    yield time_line("From the queue to the first step", rows[:48])
    yield Table("Parts of each start-up", ("attempt", "part", "took"), table[: _ROWS * 2])
    yield Text(
        "The queue is measured by Slurm's clock, all other parts by the first node's clock. Waiting for other nodes is "
        "part of rendezvous, preflight, process groups, datasets and model, and first step. Parts that a run does not "
        "have, such as a queue or a preflight, are left out."
    )
    yield from nodes


# The rest ----------------------------------------------------------------------------------------------------------


def _settings(run: Run, of: str) -> Item:
    if run.plan is None:
        return Text(f"The plan{of} cannot be read.", "warning")
    return Table(f"Each setting{of} with its reason", ("setting", "reason"), [*run.plan.reasons.items()], folded=True)


def _about(runs: Sequence[Run]) -> Iterator[Item]:
    yield Text(
        f"A curve with more than {MOST:,} points is reduced to that number; each part keeps its lowest and its highest "
        "value. Sums use all logged steps; medians use 100,000 of them at most, evenly chosen. All times are UTC."
    )
    if again := sum(run.trace.again for run in runs):
        yield Text(f"{counted(again, 'logged step')} repeated after a resume: the curves show the last values.")
