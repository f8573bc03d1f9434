"""The sections of a report of one or several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dray.contract import gpus
from dray.contract.findings import counted
from dray.runs import cost
from dray.runs.metrics import number
from dray.runs.report import faults, kernels, memory, steps
from dray.runs.report.curves import MOST, reduced
from dray.runs.report.data import Run
from dray.runs.report.document import MISSING, Document, Item, Lines, Section, Series, Table, Text
from dray.runs.report.numbers import at_the_ends, figure, per_run, seconds, steps_of
from dray.runs.report.plots import curve, told
from dray.runs.result import who
from dray.runs.why import text

_DEEP = 400  # letters of a line about a failure


def document(runs: Sequence[Run], made: str) -> Document:
    """The whole report."""
    if len({run.name for run in runs}) < len(runs):  # copies of a run; colours and legends go by name
        runs = [replace(run, name=run.folder) for run in runs]
    trained = [
        Section("Loss and learning rate", tuple(_loss(runs))),
        Section("Speed", tuple(_speed(runs))),
        Section("Step time", tuple(steps.items(runs))),
        *kernels.sections(runs),
        Section("Memory", tuple(memory.items(runs))),
        Section("Checkpoints", tuple(faults.checkpoints(runs))),
    ]
    untrained = Section("Training", (Text("dray's trainer logged no step, so losses and speed are unknown."),))
    sections = [
        *(trained if any(run.trace.columns["step"] for run in runs) else [untrained]),
        Section("Attempts and faults", tuple(faults.attempts(runs))),
        Section("Start-up", tuple(faults.startups(runs))),
        Section("Settings", tuple(_settings(runs))),
        Section("How this report was made", tuple(_about(runs))),
    ]
    head = Section("Summary" if len(runs) == 1 else "Comparison", (_summary(runs), *_warnings(runs)))
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return Document(title, tuple(_lead(runs)), (head, *sections), tuple(run.name for run in runs), made)


def _lead(runs: Sequence[Run]) -> Iterator[Text]:
    """How each run ended."""
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        if run.told.status == "done":
            yield Text(name + ", ".join(_done(run)))
        elif run.told.cause:
            first = run.told.cause.why.partition("\n")[0][:_DEEP]
            yield Text(f"{name}{run.told.status}: {who(run.told.cause)}: {first}", "failure")
        else:
            yield Text(name + text(run.told).splitlines()[0].partition(": ")[2], "warning")


def _done(run: Run) -> Iterator[str]:
    """The summary of a successful run, over all attempts."""
    result, losses = run.result, at_the_ends(run.trace.values("loss"), 3)
    if not losses:
        yield "done: exit code 0"
        return
    tries = f" in {counted(run.told.attempt, 'attempt')}" if run.told.attempt > 1 else ""
    yield f"done: {steps_of(run)} steps{tries}"
    yield f"loss {' to '.join(losses)}"
    if result and result.perplexity is not None:
        yield f"perplexity {figure(result.perplexity, 2)}"
    yield f"{figure(run.trace.median('tokens_per_s'))} tokens/s"
    yield f"{_ranks(run)} ranks on {_hosts(run)}"


def _warnings(runs: Sequence[Run]) -> Iterator[Text]:
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        if run.told.cause or run.told.status == "stopped":
            fix = f" Fix: {run.told.fix}" if run.told.fix else ""
            yield Text(f"{name}cause: {run.told.name}.{fix}", "failure")
        yield from (Text(name + warning[:_DEEP], "warning") for warning in run.warnings[:20])


def _summary(runs: Sequence[Run]) -> Table:
    made = per_run("What ran, and how fast" if len(runs) == 1 else "The runs compared", runs, (
        ("status", lambda run: run.told.status),
        ("attempts", lambda run: str(run.told.attempt)),
        ("nodes", _hosts),
        ("ranks", _ranks),
        ("parameters", lambda run: _of_start(run, "parameters")),
        ("training", lambda run: run.plan.reasons.get("training", MISSING) if run.plan else MISSING),
        ("global batch", lambda run: run.plan.reasons.get("batch", MISSING) if run.plan else MISSING),
        ("steps", steps_of),
        ("loss, first and last", lambda run: " to ".join(at_the_ends(run.trace.values("loss"), 4)) or MISSING),
        ("perplexity, last evaluation", lambda run: figure(run.result.perplexity if run.result else None, 2)),
        ("tokens/s, median", lambda run: figure(run.trace.median("tokens_per_s"))),
        ("step, median", lambda run: seconds(run.trace.median("step_s"))),
        ("MFU, median", lambda run: _percent(run.trace.median("mfu"))),
        ("memory of rank 0, peak", _gb),
        ("waiting for data", lambda run: _waited(run, "data_s")),
        ("waiting for checkpoints", lambda run: _waited(run, "checkpoint_s")),
        ("cost, all attempts", lambda run: cost.text(run.result.spent if run.result else None) or MISSING),
        ("run folder", lambda run: run.folder),
    ))  # fmt: skip
    return replace(made, rows=tuple(row for row in made.rows if {*row[1:]} != {MISSING}))


def _loss(runs: Sequence[Run]) -> Iterator[Item]:
    yield curve(runs, "loss", "Training loss", "loss, mean over all labels since the last logged step")
    rows = []
    for run in runs:
        for name, found in run.trace.evals.items():
            points = tuple((float(step), value) for step, event in sorted(found.items())
                          if (value := number(event, "loss")) is not None)  # fmt: skip
            if points:
                rows.append((run, name, points, found[max(found)]))
    if any(len(points) > 1 for _, _, points, _ in rows):
        series = tuple(Series(f"{run.name}: {name}" if len(runs) > 1 else name, reduced([*points]), dots=True)
                       for run, name, points, _ in rows[:24])  # fmt: skip
        yield Lines("Evaluation loss", "step", "loss", series, alt=told(series, "loss"))
    if rows:
        head = ("dataset", *(("run",) if len(runs) > 1 else ()), "step", "loss", "perplexity", "accuracy")
        yield Table("The last evaluation of each dataset", head, tuple(
            (name, *((run.name,) if len(runs) > 1 else ()), figure(points[-1][0]), figure(points[-1][1], 4),
             figure(number(event, "perplexity"), 2), figure(number(event, "accuracy"), 4))
            for run, name, points, event in rows[:200]
        ))  # fmt: skip
    yield curve(runs, "lr", "Learning rate", "learning rate", from_zero=True)


def _speed(runs: Sequence[Run]) -> Iterator[Item]:
    yield curve(
        runs, "tokens_per_s", "Tokens per second", "tokens/s, all ranks, since the last logged step", from_zero=True
    )
    if any(run.trace.values("mfu") for run in runs):
        yield curve(runs, "mfu", "Model FLOPs utilization (MFU)", "MFU", from_zero=True)
    yield Text(
        "MFU = tokens/s / ranks x FLOPs per token / the vendor's peak. FLOPs per token = 6 x weights in matrix "
        "products - 2 x frozen weights + 12 x layers x hidden size x sequence length. The peak is the vendor's figure "
        "for dense matrix products in the run's 16-bit type."
    )
    yield per_run("Parts of MFU", runs, (
        ("MFU, median", lambda run: _percent(run.trace.median("mfu"))),
        ("GPU", lambda run: _device(run) or ("none: MFU is for GPUs" if _on_cpu(run) else MISSING)),
        ("vendor's peak", _peak),
        ("measured peak", _ceiling),
        ("FLOPs per token", lambda run: _of_start(run, "flops_per_token")),
        ("bus bandwidth, preflight", _bandwidth),
    ))  # fmt: skip


def _settings(runs: Sequence[Run]) -> Iterator[Item]:
    for run in runs:
        name = f" of {run.name}" if len(runs) > 1 else ""
        if run.plan:
            rows = tuple((key, why) for key, why in run.plan.reasons.items())
            yield Table(f"Each setting{name} with its reason", ("setting", "reason"), rows, folded=True)
        else:
            yield Text(f"The plan{name} cannot be read.", "warning")


def _about(runs: Sequence[Run]) -> Iterator[Item]:
    again = sum(run.trace.again for run in runs)
    yield Text(
        f"A curve with more than {MOST:,} points is reduced to that number; each part keeps its lowest and its highest "
        "value. Medians and sums use all logged steps. All times are UTC."
    )
    if again:
        yield Text(f"{counted(again, 'logged step')} repeated after a resume: the curves show the last values.")


def _waited(run: Run, key: str) -> str:
    return seconds(run.trace.spent[key] or None, none="not at all") if run.trace.columns["step"] else MISSING


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"


def _of_start(run: Run, key: str) -> str:
    return figure(next((value for one in run.trace.of("start") if (value := number(one, key)) is not None), None))


def _device(run: Run) -> str:
    return next((one["device"][:100] for one in run.trace.of("start") if isinstance(one.get("device"), str)), "")


def _on_cpu(run: Run) -> bool:
    return bool(run.plan and run.plan.variant == "cpu")


def _peak(run: Run) -> str:
    gpu, train = gpus.find(_device(run)), run.plan and run.plan.recipe.train
    if gpu is None or not train:
        return "no GPU" if _on_cpu(run) else MISSING
    return f"{gpu.bf16 if train.precision == 'bf16' else gpu.fp16:g} TFLOP/s ({gpu.source})"


def _ceiling(run: Run) -> str:
    """The speed of the slowest GPU, measured before the launch of the last attempt that has it."""
    found = next((one.nodes.tflops for one in reversed(run.tries) if one.nodes and one.nodes.tflops), None)
    if found is None:
        return "no GPU" if _on_cpu(run) else f"{MISSING}; python -m dray.checks measures it"
    return f"{found.s:.0f} TFLOP/s on the slowest GPU (on {found.node}), measured before the launch"


def _bandwidth(run: Run) -> str:
    sweep = run.tries[-1].preflight.get("sweep") if run.tries else None
    rows = [row for row in sweep if isinstance(row, dict)] if isinstance(sweep, list) else []
    best = max((value for row in rows if (value := number(row, "bus_gb_s")) is not None), default=None)
    return f"{best:g} GB/s" if best is not None else MISSING


def _gb(run: Run) -> str:
    peak = max(run.trace.values("memory_gb"), default=None)
    return MISSING if peak is None else f"{peak:.2f} GB"


def _ranks(run: Run) -> str:
    planned = run.plan.world.size if run.plan else None
    return figure(run.result.world_size if run.result and run.result.world_size else planned)


def _hosts(run: Run) -> str:
    hosts = run.tries[-1].hosts if run.tries else ()
    return f"{counted(len(hosts), 'node')}: {' '.join(hosts[:12])}{' ...' * (len(hosts) > 12)}" if hosts else MISSING
