"""The progress of a run: a line for each logged step of a recipe, or what a command prints."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dray.contract.control_characters import printable
from dray.contract.findings import counted, duration
from dray.planning.schema import Plan
from dray.runs.active_run.logs import Growing, Output
from dray.runs.metrics import LONGEST, Event, number, parsed, whole
from dray.runs.store import RunPaths

_FIGURES = {
    "loss": "loss {:.3f}",
    "perplexity": "perplexity {:.2f}",
    "accuracy": "accuracy {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
}


class Progress:
    """Shows the progress of one run. On a hostfile's other machines (`only`), which have no metrics, it shows what
    their first rank prints."""

    def __init__(self, plan: Plan, paths: RunPaths, only: int | None = None) -> None:
        world, rank = plan.world, (only or 0) * plan.world.ranks_per_node
        where = f"{counted(world.size, 'rank')} on {counted(len(world.nodes), 'node')} ({plan.engine})"
        self.rank: int | None = None  # whose output is shown
        self._view: Output | Steps = Steps(paths.metrics)
        if rank or not plan.recipe.train:
            self.rank, self._view = rank, Output(paths.rank_log(rank))
            if world.size > 1:
                where += f"; rank {rank} is shown here, the logs of all are in {paths.folder.name}/{paths.logs.name}"
        print(f"run folder: {paths.run}\n{plan.recipe.name}: {where}", flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._view.close()

    def update(self) -> None:
        """Show what has come since the last look."""
        self._view.look()

    def stopping(self) -> None:
        """Print that the run is being stopped."""
        self._view.close()
        print("stopping: ranks get a few seconds to end by themselves; Ctrl-C again ends them at once", flush=True)


class Steps:
    """Prints a line for each logged step and for each evaluation."""

    def __init__(self, metrics: Path) -> None:
        self._file = Growing(metrics)

    def look(self) -> None:
        """Print what has come since the last look."""
        with suppress(FileNotFoundError):
            for line in self._file.lines(LONGEST):
                if text := described(parsed(line) or {}):
                    print(text, flush=True)

    def close(self) -> None:
        """Each line is already whole."""


def described(event: Event) -> str:
    """An event of the metrics as a line; empty for those that are not shown."""
    kind, step = str(printable(event.get("event")))[:80], whole(event, "step")
    if kind == "start":
        first = whole(event, "first_step")
        return f"resumed at step {first} of {whole(event, 'steps')}" if first else ""
    if kind == "step":
        parts = [f"step {step}"]
    elif "perplexity" in event:
        parts = [f"{kind.replace('eval', 'evaluation', 1).replace('-', ' ', 1)} at step {step}"]
    else:
        return ""
    for name, form in _FIGURES.items():
        if name in event:
            value = number(event, name)
            parts.append(f"{name} not finite" if value is None else form.format(value))
    left = number(event, "seconds_left")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)
