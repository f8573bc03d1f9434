"""What `dray model`, `data` and `prefetch` ask of the image: one job, as JSON. `outputs/__main__.py` runs it."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args


class Evaluate(NamedTuple):
    """Evaluate a saved model on the datasets of the plan's recipe."""

    model: str
    plan: dict[str, Any]
    device_map: bool = False
    """Whether its layers are placed on several devices."""


class LmEval(NamedTuple):
    """Evaluate a saved model on tasks of lm-eval."""

    model: str
    tasks: str
    options: list[str]
    """Options of lm-eval, which win over dray's."""
    variant: str
    per_device: int
    trust_remote_code: bool
    device_map: bool = False


class Generate(NamedTuple):
    """Generate text from a prompt; with 0 tokens, as many as fit."""

    model: str
    objective: str
    prompt: str
    tokens: int
    temperature: float
    seed: int
    trust_remote_code: bool
    device_map: bool = False


class Export(NamedTuple):
    """Write a checkpoint's weights as a folder that `from_pretrained` loads, or all of it as torch's DCP."""

    checkpoint: str
    target: str
    dtype: str
    plan: dict[str, Any]
    format: str = "transformers"
    """Or `dcp`."""
    shard_gb: float = 4.0
    """Largest size of one file of weights, which is in memory as a whole."""


class Push(NamedTuple):
    """Push a saved model to the hub."""

    model: str
    name: str
    private: bool


class Prefetch(NamedTuple):
    """Download what these sections of a recipe name on the hub."""

    data: dict[str, Any]
    model: dict[str, Any]
    evaluate: dict[str, Any]


class Inspect(NamedTuple):
    """Write what a recipe's training would read, and its first rows, as JSON into the file `report`."""

    recipe: dict[str, Any]
    rows: int
    report: str


class Importing(NamedTuple):
    """Import another program's checkpoint: as a model into `target`, and for runs of `recipe`; each may be empty."""

    source: str
    target: str
    recipe: dict[str, Any]
    config: str
    prefix: str | None
    dtype: str
    trust: bool


class Sync(NamedTuple):
    """Send the metrics of a run's folder to trackers, once or until the run ends."""

    folder: str
    run: str
    project: str
    trackers: list[str]
    follow: bool


Job = Evaluate | LmEval | Generate | Export | Push | Prefetch | Inspect | Importing | Sync
KINDS: dict[str, type[Job]] = {kind.__name__.lower(): kind for kind in get_args(Job)}


def to_json(job: Job) -> dict[str, Any]:
    """The job as JSON, with its kind."""
    return {"job": type(job).__name__.lower(), **job._asdict()}


def of_json(fields: dict[str, Any]) -> Job:
    """The job that `to_json` wrote."""
    values = dict(fields)
    return KINDS[values.pop("job")](**values)
