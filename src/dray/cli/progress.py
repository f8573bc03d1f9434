"""How a run goes, from metrics.jsonl: a live bar in a terminal, a plain line a report elsewhere."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from dray.planning.schema import Plan
from dray.runs.paths import RunPaths


class Progress:
    """Follows the metrics of one run."""

    def __init__(self, plan: Plan, paths: RunPaths) -> None:
        self._paths = paths
        self._position = 0
        self._console = Console()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        steps = plan.recipe.train.steps if plan.recipe.train else None
        self._task = self._bar.add_task("starting", total=steps, figures="")
        where = f"{_counted(plan.world.size, 'rank')} on {_counted(len(plan.world.nodes), 'node')}"
        self._say(f"{plan.recipe.name}: {where} ({plan.engine})")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()
        self._bar.stop()

    def update(self) -> None:
        """Read what has come since the last look."""
        if not self._paths.metrics.exists():
            return
        with self._paths.metrics.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                self._show(json.loads(line))

    def _show(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._bar.update(self._task, description="training")
        elif event["event"] == "step":
            figures = (
                f"loss {event['loss']:.3f}  {event['tokens_per_s']:,.0f} tokens/s  {event['seconds_left']:.0f} s left"
            )
            self._bar.update(self._task, completed=event["step"], figures=figures)
            if not self._console.is_terminal:
                self._say(f"step {event['step']}  {figures}")
        elif event["event"] == "eval":
            found = event["perplexity"]
            figures = "perplexity not finite" if found is None else f"perplexity {found:.2f}"
            self._bar.update(self._task, description="saving", figures=figures)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' if number != 1 else ''}"
