"""The progress of a run: a recipe's steps, or what a command prints."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from dray.contract.control_characters import printable
from dray.contract.findings import counted
from dray.planning.schema import Plan
from dray.runs.follow import Growing, Output
from dray.runs.metrics import LONGEST, Event, number, parsed, whole
from dray.runs.store import RunPaths


class Progress:
    """Shows the progress of one run. On a hostfile's other machines (`only`), which have no metrics, it shows what
    their first rank prints."""

    def __init__(self, plan: Plan, paths: RunPaths, only: int | None = None) -> None:
        world, train = plan.world, plan.recipe.train
        rank = (only or 0) * world.ranks_per_node
        where = f"{counted(world.size, 'rank')} on {counted(len(world.nodes), 'node')} ({plan.engine})"
        self.rank: int | None = None  # whose output is shown
        self._view: Output | Steps
        if train and rank == 0:
            self._view = Steps(paths.metrics, train.steps)
        else:
            self.rank, self._view = rank, Output(paths.rank_log(rank))
            if world.size > 1:
                where += f"; rank {rank} is shown here, the logs of all are in {paths.folder.name}/{paths.logs.name}"
        print(f"run folder: {paths.run}\n{plan.recipe.name}: {where}", flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """Shows steps as a bar on a terminal, elsewhere a line for each; an evaluation is a line on both."""

    def __init__(self, metrics: Path, steps: int | None, *, position: int = 0) -> None:
        self._file = Growing(metrics, position)
        self._steps, self._figures = steps or 0, ""
        console = Console()
        self._bar: Bar | None = None
        self._plain = not console.is_interactive
        if not self._plain:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[count]}"),
                TextColumn("{task.fields[figures]}"),
            )
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task("starting", total=None, count="", figures="")

    def look(self) -> None:
        """Show what has come since the last look."""
        if self._bar:
            self._bar.start()
        with suppress(FileNotFoundError):
            for event in filter(None, map(parsed, self._file.lines(LONGEST))):
                self._show(event)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _show(self, event: Event) -> None:
        kind, step, text = event.get("event"), whole(event, "step") or 0, described(event)
        if kind == "start":
            self._steps = whole(event, "steps") or self._steps
            if first := whole(event, "first_step"):
                self._say(f"resumed at step {first} of {self._steps}")
            self._draw(first or 0, "training", "evaluating")
        elif kind == "step":
            self._figures = text
            if self._plain:
                self._say(f"step {step}  {text}")
            self._draw(step, "training", "evaluating")
        elif text:
            self._say(text)
            self._draw(step, "training", "saving")

    def _draw(self, step: int, before: str, after: str) -> None:
        """Move the bar; `before` and `after` say what happens until the last step, and after it."""
        if self._bar:
            doing, count = before if step < self._steps else after, f"{step}/{self._steps}"
            self._bar.update(self._task, total=self._steps, completed=step, description=doing)
            self._bar.update(self._task, count=count, figures=self._figures, refresh=True)

    def _say(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)


_EVALUATED = {"loss": ".3f", "perplexity": ".2f", "accuracy": ".3f"}


def described(event: Event) -> str:
    """A step's figures, or an evaluation as a line; empty for other events."""
    kind = str(printable(event.get("event")))[:80]
    if kind == "step":
        speed, left = number(event, "tokens_per_s"), number(event, "seconds_left")
        parts = [_figure(event, "loss", ".3f")]
        parts += [f"{speed:,.0f} tokens/s"] if speed is not None else []
        parts += [f"{left:.0f} s left"] if left is not None else []
        return "  ".join(parts)
    if "perplexity" not in event:
        return ""
    what = kind.replace("eval", "evaluation", 1).replace("-", " ", 1)
    figures = "  ".join(_figure(event, name, form) for name, form in _EVALUATED.items())
    return f"{what} at step {whole(event, 'step')}  {figures}"


def _figure(event: Event, name: str, form: str) -> str:
    value = number(event, name)
    return f"{name} not finite" if value is None else f"{name} {value:{form}}"
