"""What the trainer reads of plan.json, typed. The plan was validated when it was made."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from dray.contract import files, run_folder
from dray.train.recipe import Analog, Checkpoint, Data, Evaluation, Lora, Model, Train


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run: the recipe's sections, its share of the world, and where it happens."""

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


def read(path: str) -> Config:
    """The plan in this file."""
    return of_plan(json.loads(files.read(path, own=True)))


def of_recipe(recipe: dict[str, Any]) -> Config:
    """The config of an unplanned recipe, for tools that need nothing of a machine."""
    batch = {"global_size": recipe["batch"]["global_size"], "per_device": 1, "gradient_accumulation_steps": 1}
    nowhere = dict.fromkeys(("run", "folder", "run_folder", "scratch", "image_sha256", "dray"), "")
    world = {"identity": {"name": ""}}
    return of_plan(
        {"recipe": recipe, "batch": batch, "variant": "cpu", "world": world, "attempt": 1, "job": 0, **nowhere}
    )


def of_plan(plan: dict[str, Any]) -> Config:
    """The part of the plan that is about training."""
    recipe, checkpoints = plan["recipe"], Path(plan["run_folder"], run_folder.CHECKPOINTS)
    parts = {
        field.name: _typed(hint, recipe[field.name])
        for field, hint in zip(fields(Config), get_type_hints(Config).values(), strict=True)
        if field.name in ("data", "model", "train", "evaluate", "checkpoint", "lora", "analog")
    }
    parts |= {name: None for name in ("lora", "analog") if parts[name] and not parts[name].enabled}
    return Config(
        name=recipe["name"],
        run=plan["run"],
        run_folder=plan["run_folder"],
        attempt=plan["attempt"],
        job=plan["job"],
        folder=plan["folder"],
        final_model=str(checkpoints / run_folder.FINAL_MODEL),
        checkpoints=recipe["checkpoint"]["folder"] or str(checkpoints),
        compiled=str(Path(plan["run_folder"], run_folder.COMPILED)),
        scratch=plan["scratch"],
        host_variable=plan["world"]["identity"]["name"],
        variant=plan["variant"],
        image_sha256=plan["image_sha256"],
        dray=plan["dray"],
        **plan["batch"],
        steps=recipe["train"]["steps"] or 0,
        hang_timeout_s=recipe["hang_timeout_s"],
        deepspeed=json.loads(recipe["train"]["deepspeed"] or "{}"),
        recipe={key: recipe[key] for key in ("batch", "data", "model", "train", "evaluate", "lora", "analog")},
        **parts,
    )


def _typed(hint: Any, value: Any) -> Any:  # noqa: ANN401  a type, and a JSON value of it
    """JSON as the types have it: tables are dataclasses, lists are tuples."""
    kind, inner = get_origin(hint), get_args(hint)
    if value is None or hint is Any:
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        return hint(**{name: _typed(inner, value[name]) for name, inner in get_type_hints(hint).items()})
    if kind is UnionType:
        return _typed(next(one for one in inner if one is not NoneType), value)
    if kind is dict:
        return {name: _typed(inner[1], one) for name, one in value.items()}
    if kind is tuple:
        return tuple(_typed(one, part) for one, part in zip(_repeated(inner, len(value)), value, strict=True))
    return value


def _repeated(inner: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return inner[:1] * count if inner[1:] == (...,) else inner
