"""Trackers that get the metrics beside metrics.jsonl, such as wandb: accelerate's classes, by accelerate's names."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from dray.contract import run_folder, secrets
from dray.contract.findings import ConfigError
from dray.train.errors import at_end, say

Numbers = dict[str, float]
_PATIENCE_S = 60.0  # for a server that does not answer, at the end of a run


class Tracked(NamedTuple):
    """The run to track; a tracker shows all its attempts as one run."""

    project: str
    run: str
    folder: Path
    """The folder of all trackers of the run."""
    first_step: int = 0


class Kind(NamedTuple):
    """One of accelerate's trackers, and what its own package needs."""

    options: Callable[[Tracked], dict[str, Any]]
    """Arguments of accelerate's class, with which a later attempt resumes the tracked run."""
    offline: dict[str, str]
    """Variables that dray sets unless the user has: no server, and files in the run folder, which is {}."""
    online: dict[str, str]
    """Variables that `dray report --sync` sets to send to the server."""
    server: tuple[str, ...] = ()
    """If one of these is set, the tracker sends to that server. Without `server` and `online` it only writes files."""
    own: Callable[..., Any] | None = None
    """A class with the methods of accelerate's, where accelerate has none of this name."""


def _mlflow(to: Tracked) -> dict[str, Any]:
    """Resume mlflow's run by its name: mlflow makes another id for it in each store."""
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", to.project)
    runs = import_module("mlflow").search_runs(
        experiment_names=[project], filter_string=f"attributes.run_name = '{to.run}'", output_format="list"
    )
    return {"experiment_name": project, "run_name": to.run, "run_id": runs[0].info.run_id if runs else None}


KINDS = {
    "tensorboard": Kind(
        # Drop the steps that an earlier attempt took after its last checkpoint: this attempt takes them again.
        lambda to: {"run_name": "tensorboard", "logging_dir": str(to.folder), "purge_step": to.first_step + 1},
        {},
        {},
    ),
    "wandb": Kind(
        lambda to: {
            "run_name": to.project, "name": to.run, "id": to.run, "resume": "allow", "dir": str(to.folder),
        },
        {"WANDB_MODE": "offline"},
        {"WANDB_MODE": "online"},
    ),
    "mlflow": Kind(_mlflow, {"MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db"}, {}, ("MLFLOW_TRACKING_URI",)),
    "trackio": Kind(
        lambda to: {"run_name": to.project, "name": to.run, "resume": "allow"},
        {"TRACKIO_DIR": "{}"},
        {},
        ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
    ),
}  # fmt: skip


def start_tracker(name: str, to: Tracked) -> Any:  # noqa: ANN401  a tracker of accelerate's
    """Start a tracker; only the thread that calls this may use it."""
    (to.folder / name).mkdir(parents=True, exist_ok=True)
    tracking: Any = import_module("accelerate.tracking")
    # accelerate's logger and main_process_only ask a PartialState for the rank; here rank 0 alone logs.
    tracking.logger = logging.getLogger("accelerate.tracking")
    kind = KINDS[name]
    tracker = (kind.own or tracking.LOGGER_TYPE_TO_CLASS[name])(**kind.options(to))
    tracker.main_process_only = False
    tracker.start()
    return tracker


def require(names: Iterable[str], fix: str) -> None:
    """Refuse a tracker that is not installed, before the run reads its datasets."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"the tracker {name} is not installed here",
                wanted=f"the Python package {name}",
                found="no such package",
                fix=fix.format(name),
            )


class Trackers:
    """The trackers of a run, each in a thread: a slow or dead server delays no step and ends no run."""

    def __init__(self, names: Iterable[str], to: Tracked) -> None:
        self._tracked = newest(read(to.folder.parent))
        self._threads = [_Thread(name, to) for name in names]
        at_end(self.close)  # also of a run that fails

    def log(self, event: dict[str, Any]) -> None:
        """Send a line to all trackers, each step once; TensorBoard alone gets a step again, and replaces it."""
        is_new = event["step"] > self._tracked.get(event["event"], -1)
        for thread in self._threads:
            if thread.is_alive() and (is_new or thread.name == "tensorboard"):
                thread.lines.put(event)

    def close(self) -> None:
        """Let them finish."""
        for thread in self._threads:
            thread.lines.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                late = f"{thread.name} did not take all metrics in {_PATIENCE_S:.0f} s"
                say(f"WARNING: {late}: send them with dray report --sync")
        self._threads = []


class _Thread(Thread):
    def __init__(self, name: str, to: Tracked) -> None:
        super().__init__(name=name, daemon=True)
        self.lines = SimpleQueue[dict[str, Any] | None]()
        self._to = to
        for variable, value in KINDS[name].offline.items():
            os.environ.setdefault(variable, value.format(to.folder / name))
        self.start()

    def run(self) -> None:
        try:
            tracker = start_tracker(self.name, self._to)
            while (event := self.lines.get()) is not None:
                tracker.log(numbers(event), step=event["step"])
            tracker.finish()
        except BaseException as error:  # some end their program
            say(f"WARNING: {self.name} gets no more metrics: {secrets.redacted(str(error) or repr(error))}")


def numbers(event: dict[str, Any]) -> Numbers:
    """Flatten a line to `event/name: number`, or `event/name/key: number` for the items of a list or a table."""
    flat = dict[str, float]()
    for name, value in event.items():
        if isinstance(value, list):
            items: Iterable[tuple[Any, Any]] = enumerate(value)
        else:
            items = value.items() if isinstance(value, dict) else [("", value)]
        for key, number in items:
            if isinstance(number, int | float) and name != "time":
                flat["/".join(filter(None, (event["event"], name, str(key))))] = number
    return flat


def read(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines with a step, of all attempts of a run, in order."""
    for number in itertools.count(1):
        attempt = run / run_folder.attempt(number)
        if not attempt.is_dir():
            return
        with suppress(OSError), (attempt / run_folder.METRICS).open("rb") as file:
            for line in file:
                with suppress(ValueError):  # a line is cut if its attempt was killed
                    event = json.loads(line)
                    if "step" in event:
                        yield event


def newest(events: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return the last step of each event."""
    return {event["event"]: event["step"] for event in sorted(events, key=lambda event: event["step"])}
