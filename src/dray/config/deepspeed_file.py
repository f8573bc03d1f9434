"""A user's DeepSpeed JSON: the recipe decides what it leaves `auto`; a value in both must be the same.

transformers' Trainer has this rule too: no option wins over DeepSpeed's file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dray.config.load_toml import validate
from dray.config.recipe import Recipe
from dray.config.training import STRATEGIES, Strategy
from dray.contract.files import parse_json
from dray.contract.findings import ConfigError

# What both DeepSpeed and a recipe set. The optimizer and the schedule are dray's own, so their sections go.
_SAME = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.per_device",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer.params.lr": "train.lr",
    "optimizer.params.betas": "train.betas",
    "optimizer.params.eps": "train.eps",
    "optimizer.params.weight_decay": "train.weight_decay",
    "scheduler.params.warmup_max_lr": "train.lr",
    "scheduler.params.warmup_num_steps": "train.warmup_steps",
    "scheduler.params.total_num_steps": "train.steps",
}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZER, _PARAM = (f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param"))
# What is said of a value that dray's trainer cannot have; the values that it can have, the first being the fix.
_VALUES = {
    _OPTIMIZER: ("dray offloads to the host's memory only", ("cpu", "none")),
    _PARAM: ("dray offloads to the host's memory only", ("cpu", "none")),
    "optimizer.type": ("dray trains with AdamW", ("AdamW", "Adam")),
    "scheduler.type": ("dray does not know this schedule", tuple(_SCHEDULES)),
}
_DROPPED = {
    *("bf16", "optimizer", "scheduler"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "steps_per_print"),
}
_BOTH = ("train.strategy", "train.precision")  # [command] has them too
_OPEN = (None, "auto")
_LARGEST_POWER = 127  # of a scale that fp32 holds

_Setting = tuple[str, str, Any]
"""A key of the recipe, the file's key that sets the same, and the value as the recipe has it."""


def agreed(recipe: Recipe, text: str, path: Path) -> Recipe:
    """The recipe with the file's values, and with the rest of the file, which only DeepSpeed reads."""
    file = parse_json(text, "the DeepSpeed file", path)
    if not isinstance(file, dict):
        raise ConfigError(
            "the DeepSpeed file is not a JSON object", where=path, wanted="{...}", found=type(file).__name__
        )
    section = "train" if recipe.train else "command"
    table: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    settings = [*_of_precision(file, path), *_of_stage(file, path, table[section].get("strategy"), section)]
    if recipe.train:
        settings += _of_trainer(file, path)
    else:  # the rest is between DeepSpeed, accelerate and the script
        settings = [(name.replace("train", section), key, value) for name, key, value in settings if name in _BOTH]
    for name, key, value in settings:
        part, field = name.split(".")
        value_set = table.setdefault(part, {}).setdefault(field, value)
        if value_set != value:
            raise ConfigError(
                f"{name} and {key} do not agree",
                where=f"the recipe and {path}",
                wanted=f"{name} = {json.dumps(value_set)}, as the recipe says",
                found=f"{key} = {json.dumps(_at(file, key))}, in {path.name}",
                fix=f'write "{key.rpartition(".")[2]}": "auto" in {path.name}, or make them the same',
            )
    if recipe.train:
        file = _without_auto({key: value for key, value in file.items() if key not in {*_DROPPED, *_SAME}})
    else:
        _fill(file, **table["command"])
    table[section]["deepspeed"] = json.dumps(file)
    return validate(Recipe, table, what=f"the recipe with {path}")


def _fill(file: dict[str, Any], *, strategy: Strategy, precision: str = "", **_: object) -> None:
    """Put stage and precision into it: beside a file of DeepSpeed's, accelerate refuses both in its own."""
    decided: dict[str, dict[str, Any]] = {"zero_optimization": {"stage": STRATEGIES[strategy].stage}}
    for kind in ("fp16", "bf16") if precision else ():
        decided[kind] = {"enabled": kind == precision}
    for name, values in decided.items():
        section = file.get(name)
        file[name] = section | values if isinstance(section, dict) else values


def _at(file: dict[str, Any], key: str) -> Any:  # noqa: ANN401  any JSON value
    """The file's value of a dotted key; None where it has none."""
    value: Any = file
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _of_precision(file: dict[str, Any], path: Path) -> Iterator[_Setting]:
    least, power = _at(file, "fp16.min_loss_scale"), _at(file, "fp16.initial_scale_power")
    if isinstance(least, float) and not least.is_integer():
        raise ConfigError(
            "DeepSpeed needs a whole number as its smallest loss scale",
            where=f"{path}: fp16.min_loss_scale",
            wanted="1 or more",
            found=least,
            fix='write "min_loss_scale": 1; a scale below 1 makes small gradients smaller',
        )
    if power not in _OPEN and (type(power) is not int or not 0 <= power <= _LARGEST_POWER):
        raise ConfigError(
            "DeepSpeed's initial loss scale is no number",
            where=f"{path}: fp16.initial_scale_power",
            wanted=f"a whole number from 0 to {_LARGEST_POWER}, the exponent of 2",
            found=json.dumps(power),
            fix='write "initial_scale_power": 16',
        )
    if type(power) is int:
        yield "train.initial_loss_scale", "fp16.initial_scale_power", 2.0**power
    fp16, bf16 = (_at(file, f"{kind}.enabled") for kind in ("fp16", "bf16"))
    if fp16 is True and bf16 is True:
        raise ConfigError("fp16 and bf16 are both enabled", where=path, fix="enable one, or write auto for both")
    if bf16 is True:
        yield "train.precision", "bf16.enabled", "bf16"
    elif fp16 is True or (fp16 is False and bf16 is False):
        yield "train.precision", "fp16.enabled", "fp16" if fp16 else "fp32"


def _of_stage(file: dict[str, Any], path: Path, strategy: Strategy | None, section: str) -> Iterator[_Setting]:
    stage = _at(file, "zero_optimization.stage")
    if type(stage) is int and stage in (1, 2, 3):
        yield "train.strategy", "zero_optimization.stage", f"zero{stage}"
    elif stage not in _OPEN or strategy is None or not STRATEGIES[strategy].deepspeed:
        raise ConfigError(
            "DeepSpeed's ZeRO stage is missing",
            where=path,
            wanted=f"zero_optimization.stage of 1, 2 or 3, or {section}.strategy of zero1, zero2 or zero3",
            found=stage,
            fix=f"set one of them; without ZeRO, leave {section}.deepspeed out",
        )


def _of_trainer(file: dict[str, Any], path: Path) -> Iterator[_Setting]:
    for key, (problem, values) in _VALUES.items():
        value = _at(file, key)
        if value not in (*_OPEN, *values):
            raise ConfigError(
                problem, where=f"{path}: {key}", wanted=", ".join(values), found=value,
                fix=f'write "{values[0]}" or "auto"',
            )  # fmt: skip
    for key, name in _SAME.items():
        if (value := _at(file, key)) not in _OPEN:
            yield name, key, value
    param, optimizer, schedule = _at(file, _PARAM), _at(file, _OPTIMIZER), _at(file, "scheduler.type")
    if param == "cpu" and optimizer not in ("cpu", "auto"):
        raise ConfigError(
            "weights are offloaded, but the optimizer is not",
            where=path,
            wanted="offload_optimizer beside offload_param",
            found=_PARAM,
            fix='add "offload_optimizer": {"device": "cpu"}',
        )
    if param == "cpu":
        yield "train.offload", _PARAM, "all"
    elif optimizer in ("cpu", "none"):
        yield "train.offload", _OPTIMIZER, "optimizer" if optimizer == "cpu" else ""
    if schedule in _SCHEDULES:
        yield "train.lr_scheduler_type", "scheduler.type", _SCHEDULES[schedule]


def _without_auto(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """What is still `auto` here is DeepSpeed's to decide: it takes its own default for what is left out."""
    if isinstance(value, dict):
        return {key: _without_auto(inner) for key, inner in value.items() if inner != "auto"}
    return value
