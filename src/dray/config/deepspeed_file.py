"""A user's DeepSpeed JSON: the recipe decides what it leaves `auto`; a value in both must be the same.

transformers' Trainer has this rule too: no option wins over DeepSpeed's file.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from dray.config.model import validate
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
_DEVICES = ("auto", "none", "cpu")
_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
_OFFLOAD_PARAM = "zero_optimization.offload_param.device"
# The values that dray's trainer can have; what is said of another one, and the fix.
_VALUES = {
    _OFFLOAD_OPTIMIZER: (_DEVICES, "dray offloads to the host's memory only", "write cpu"),
    _OFFLOAD_PARAM: (_DEVICES, "dray offloads to the host's memory only", "write cpu"),
    "optimizer.type": (
        ("auto", "Adam", "AdamW"), "dray trains with AdamW", "write AdamW, or leave the section out",
    ),
    "scheduler.type": (
        ("auto", *_SCHEDULES), "dray does not know this schedule",
        "leave the section out, and set train.lr_scheduler_type",
    ),
}  # fmt: skip
_DROPPED = {
    "bf16",
    "optimizer",
    "scheduler",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
}
_BOTH = ("train.strategy", "train.precision")  # [command] has them too
_MISSING: Any = object()
_OPEN = (_MISSING, "auto")


def agreed(recipe: Recipe, text: str, path: Path) -> Recipe:
    """The recipe with the file's values, and with the rest of the file, which only DeepSpeed reads."""
    file = _parsed(text, path)
    section = "train" if recipe.train else "command"
    part = recipe.train or recipe.command
    assert part is not None
    settings = [*_of_precision(file, path), *_of_stage(file, path, part.strategy, section)]
    if recipe.train:
        settings += _of_trainer(file, path)
    else:  # the rest is between DeepSpeed, accelerate and the script
        settings = [(f"command.{name[6:]}", key, value) for name, key, value in settings if name in _BOTH]
    table: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    for name, key, value in settings:
        section, field = name.split(".")
        section_table = table.setdefault(section, {})
        if section_table.setdefault(field, value) != value:
            raise ConfigError(
                f"{name} and {key} do not agree",
                where=f"the recipe and {path}",
                wanted=f"{name} = {json.dumps(section_table[field])}, as the recipe says",
                found=f"{key} = {json.dumps(_at(file, key))}, in {path.name}",
                fix=f'write "{key.rpartition(".")[2]}": "auto" in {path.name}, or make them the same',
            )
    if recipe.train:
        rest = {key: value for key, value in file.items() if key not in _DROPPED and key not in _SAME}
        table["train"]["deepspeed"] = json.dumps(_without_auto(rest))
    else:
        table["command"]["deepspeed"] = json.dumps(_filled(file, **table["command"]))
    return validate(Recipe, table, what=f"the recipe with {path}")


def _filled(file: dict[str, Any], *, strategy: Strategy, precision: str = "", **_: object) -> dict[str, Any]:
    """With stage and precision in it: beside a file of DeepSpeed's, accelerate refuses both in its own."""
    decided: dict[str, dict[str, Any]] = {"zero_optimization": {"stage": STRATEGIES[strategy].stage}}
    if precision:
        decided |= {kind: {"enabled": kind == precision} for kind in ("fp16", "bf16")}
    before = {name: section if isinstance(section := file.get(name), dict) else {} for name in decided}
    return {**file, **{name: {**before[name], **values} for name, values in decided.items()}}


def _parsed(text: str, path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
        if twice:
            raise ConfigError("a key appears twice", where=path, found=", ".join(sorted(twice)), fix="remove one")
        return dict(pairs)

    file = parse_json(text, "the DeepSpeed file", path, pairs=once)
    if not isinstance(file, dict):
        raise ConfigError(
            "the DeepSpeed file is not a JSON object", where=path, wanted="{...}", found=type(file).__name__
        )
    return file


def _at(file: dict[str, Any], key: str) -> Any:  # noqa: ANN401  any JSON value
    value: Any = file
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


_Found = tuple[str, str, Any]
"""A key of the recipe, the file's key that sets the same, and the value as the recipe has it."""


def _of_precision(file: dict[str, Any], path: Path) -> list[_Found]:
    least = _at(file, "fp16.min_loss_scale")
    if isinstance(least, float) and not least.is_integer():
        raise ConfigError(
            "DeepSpeed needs a whole number as its smallest loss scale",
            where=f"{path}: fp16.min_loss_scale",
            wanted="1 or more",
            found=json.dumps(least),
            fix='write "min_loss_scale": 1; a scale below 1 makes small gradients smaller',
        )
    power = _at(file, "fp16.initial_scale_power")
    scale = [("train.initial_loss_scale", "fp16.initial_scale_power", 2.0**power)] if isinstance(power, int) else []
    on = [kind for kind in ("fp16", "bf16") if _at(file, f"{kind}.enabled") is True]
    if len(on) == 2:
        raise ConfigError("fp16 and bf16 are both enabled", where=path, fix="enable one, or write auto for both")
    if on:
        return [*scale, ("train.precision", f"{on[0]}.enabled", on[0])]
    off = [kind for kind in ("fp16", "bf16") if _at(file, f"{kind}.enabled") is False]
    return [*scale, ("train.precision", "fp16.enabled", "fp32")] if len(off) == 2 else scale


def _of_stage(file: dict[str, Any], path: Path, strategy: Strategy | None, section: str) -> list[_Found]:
    stage = _at(file, "zero_optimization.stage")
    by_recipe = stage in _OPEN and strategy is not None and STRATEGIES[strategy].deepspeed
    if stage not in (1, 2, 3) and not by_recipe:
        raise ConfigError(
            "DeepSpeed's ZeRO stage is missing",
            where=path,
            wanted=f"zero_optimization.stage of 1, 2 or 3, or {section}.strategy of zero1, zero2 or zero3",
            found="nothing" if stage is _MISSING else json.dumps(stage),
            fix=f"set one of them; without ZeRO, leave {section}.deepspeed out",
        )
    return [] if by_recipe else [("train.strategy", "zero_optimization.stage", f"zero{stage}")]


def _of_trainer(file: dict[str, Any], path: Path) -> list[_Found]:
    for key, (values, problem, fix) in _VALUES.items():
        value = _at(file, key)
        if value not in (_MISSING, *values):
            wanted = ", ".join(values)
            raise ConfigError(problem, where=f"{path}: {key}", wanted=wanted, found=json.dumps(value), fix=fix)
    param, optimizer, schedule = (_at(file, key) for key in (_OFFLOAD_PARAM, _OFFLOAD_OPTIMIZER, "scheduler.type"))
    if param == "cpu" and optimizer not in ("cpu", "auto"):
        raise ConfigError(
            "weights are offloaded, but the optimizer is not",
            where=path,
            wanted="offload_optimizer beside offload_param",
            found=_OFFLOAD_PARAM,
            fix='add "offload_optimizer": {"device": "cpu"}',
        )
    settings = [(name, key, value) for key, name in _SAME.items() if (value := _at(file, key)) not in _OPEN]
    if param == "cpu":
        settings.append(("train.offload", _OFFLOAD_PARAM, "all"))
    elif optimizer in ("cpu", "none"):
        settings.append(("train.offload", _OFFLOAD_OPTIMIZER, "optimizer" if optimizer == "cpu" else ""))
    if schedule in _SCHEDULES:
        settings.append(("train.lr_scheduler_type", "scheduler.type", _SCHEDULES[schedule]))
    return settings


def _without_auto(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """What is still `auto` here is DeepSpeed's to decide: it takes its own default for what is left out."""
    if isinstance(value, dict):
        return {key: _without_auto(inner) for key, inner in value.items() if inner != "auto"}
    return value
