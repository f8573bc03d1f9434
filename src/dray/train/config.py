"""What the trainer reads of plan.json, typed. The plan was validated when it was made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dray.contract import files, run_folder
from dray.train.recipe_schema import Analog, Checkpoint, Data, Evaluation, Lora, Model, Source, Train

Section = TypeVar("Section")
_PLAN_KEYS = ("run", "run_folder", "attempt", "job", "folder", "scratch", "variant", "image_sha256", "dray")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run: the recipe's sections, the batch sizes, and the run's paths."""

    name: str
    run: str
    run_folder: str
    attempt: int
    job: int  # Slurm's number; 0 without
    folder: str
    final_model: str
    checkpoints: str
    compiled: str
    scratch: str
    host_variable: str
    variant: str
    image_sha256: str
    dray: str
    global_size: int
    per_device: int
    gradient_accumulation_steps: int
    steps: int  # 0 until the dataset's length is known, where the recipe sets epochs
    hang_timeout_s: int | None
    deepspeed: dict[str, Any]
    data: Data
    model: Model
    train: Train
    evaluate: dict[str, Evaluation]
    checkpoint: Checkpoint
    lora: Lora | None
    analog: Analog | None
    recipe: dict[str, Any]  # as the plan has it, for the model's card

    @property
    def step_tokens(self) -> int:
        """Tokens in one optimizer step, over all ranks."""
        return self.global_size * self.data.sequence_length

    def row_length(self, step: int) -> int:
        """Tokens in each row of this step, the first of which is 0: fewer in train.sequence_length_warmup."""
        warmup = self.train.sequence_length_warmup
        return next((length for until, length in warmup if step < until), self.data.sequence_length)


def read(path: str) -> Config:
    """Return the config of the plan in this file."""
    return of_plan(json.loads(files.read(path, own=True)))


def of_recipe(recipe: dict[str, Any]) -> Config:
    """Return the config of a recipe without a plan, for tools that need neither ranks nor paths."""
    batch = {"global_size": recipe["batch"]["global_size"], "per_device": 1, "gradient_accumulation_steps": 1}
    no_paths = dict.fromkeys(("run", "folder", "run_folder", "scratch", "image_sha256", "dray"), "")
    world = {"identity": {"name": ""}}
    return of_plan(
        {"recipe": recipe, "batch": batch, "variant": "cpu", "world": world, "attempt": 1, "job": 0, **no_paths}
    )


def of_plan(plan: dict[str, Any]) -> Config:
    """Return what training needs of a plan."""
    recipe, checkpoints = plan["recipe"], Path(plan["run_folder"], run_folder.CHECKPOINTS)
    lora, analog = recipe["lora"], recipe["analog"]
    return Config(
        name=recipe["name"],
        final_model=str(checkpoints / run_folder.FINAL_MODEL),
        checkpoints=recipe["checkpoint"]["folder"] or str(checkpoints),
        compiled=str(Path(plan["run_folder"], run_folder.COMPILED)),
        host_variable=plan["world"]["identity"]["name"],
        **{name: plan[name] for name in _PLAN_KEYS},
        **plan["batch"],
        steps=recipe["train"]["steps"] or 0,
        hang_timeout_s=recipe["hang_timeout_s"],
        deepspeed=json.loads(recipe["train"]["deepspeed"] or "{}"),
        data=_section(Data, recipe["data"] | {"mix": _tables(Source, recipe["data"]["mix"])}),
        model=_section(Model, recipe["model"]),
        train=_section(Train, recipe["train"]),
        evaluate=_tables(Evaluation, recipe["evaluate"]),
        checkpoint=_section(Checkpoint, recipe["checkpoint"]),
        lora=_section(Lora, lora) if lora and lora["enabled"] else None,
        analog=_section(Analog, analog) if analog and analog["enabled"] else None,
        recipe={key: recipe[key] for key in ("batch", "data", "model", "train", "evaluate", "lora", "analog")},
    )


def _section(kind: type[Section], values: dict[str, Any]) -> Section:
    """A section of the recipe; JSON's lists are its tuples."""
    return kind(**{key: _tuples(value) for key, value in values.items()})


def _tables(kind: type[Section], tables: dict[str, Any]) -> dict[str, Section]:
    return {name: _section(kind, values) for name, values in tables.items()}


def _tuples(value: Any) -> Any:  # noqa: ANN401  any JSON value
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
