"""What the trainer needs of plan.json, typed. The plan was validated when it was made; here it is only read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run, as this rank sees it."""

    folder: str
    name_variable: str
    variant: str
    world_size: int
    global_size: int
    per_device: int
    accumulation: int
    text: str
    validation_percent: int
    block: int
    model_type: str
    model_config: dict[str, Any]
    steps: int
    lr: float
    warmup_steps: int
    schedule: str
    weight_decay: float
    precision: str
    seed: int
    log_every: int
    clip: float
    strategy: str
    offload: str
    compile: bool
    every: tuple[tuple[int, int], ...]
    keep: int
    cache: str
    about: dict[str, Any]


def read(path: str) -> Config:
    """The plan's part that is about training."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    recipe = plan["recipe"]
    return Config(
        folder=plan["folder"],
        name_variable=plan["world"]["identity"]["name"],
        variant=plan["variant"],
        world_size=plan["world"]["size"],
        **plan["batch"],
        model_type=recipe["model"]["type"],
        model_config=recipe["model"]["config"],
        **recipe["data"],
        **recipe["train"],
        every=tuple((until, each) for until, each in recipe["checkpoint"]["every"]),
        keep=recipe["checkpoint"]["keep"],
        about={"run": plan["run"], "image_sha256": plan["image_sha256"], "dray": plan["dray"]},
    )
