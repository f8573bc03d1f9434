"""A user's configuration file for accelerate: it decides what [command] leaves out.

It is read with PyYAML's safe loader, as accelerate itself reads it, so that both see the same; that loader takes JSON.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from dray.config.load_toml import validate
from dray.config.recipe import Command, Recipe
from dray.contract.findings import ConfigError, listed, nearest

# What accelerate 1.15 reads; it ends on each node where there is another key.
KEYS = {
    "command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type",
    "downcast_bf16", "dynamo_backend", "dynamo_config", "enable_cpu_affinity", "fp8_config", "fsdp_config",
    "gpu_ids", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "megatron_lm_config", "mixed_precision", "mpirun_config", "num_machines", "num_processes",
    "parallelism_config", "rdzv_backend", "same_network", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo",
    "tpu_vm", "tpu_zone", "use_cpu",
}  # fmt: skip
_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_FSDP2 = {
    "reshard_after_forward": ("true", "false"),
    "auto_wrap_policy": ("transformer_based_wrap", "size_based_wrap", "no_wrap"),
    "state_dict_type": ("sharded_state_dict", "full_state_dict"),
}
# Beside a DeepSpeed file accelerate refuses these, in every rank.
_IN_DEEPSPEEDS = (
    "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
_STRATEGIES = {"NO": "ddp", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": ""}


def completed(recipe: Recipe, text: str, path: Path) -> Recipe:
    """The recipe with the values of the file that [command] leaves out, and the file as JSON."""
    file = _parsed(text, path)
    command = recipe.command
    assert command is not None
    _choice(file, path, "compute_environment", {"LOCAL_MACHINE": ""})
    precision = "" if command.precision else _choice(file, path, "mixed_precision", _PRECISIONS)
    decided = {"precision": precision, **_strategy(file, path, command)}
    table = recipe.model_dump(exclude_unset=True)
    table["command"] = {key: value for key, value in decided.items() if value} | table["command"]
    table["accelerate"] = json.dumps(file)
    return validate(Recipe, table, what=f"the recipe with {path}")


def _parsed(text: str, path: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415  only here

    try:
        file = yaml.safe_load(text)
        json.dumps(file, allow_nan=False)
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as wrong:  # a date, or NaN, is not accelerate's
        raise ConfigError("accelerate's file is not valid YAML", where=path, found=wrong) from wrong
    if not isinstance(file, dict):
        raise ConfigError(
            "accelerate's file is not a table", where=path, wanted="key: value", found=type(file).__name__,
            fix="accelerate config --config_file FILE writes one",
        )  # fmt: skip
    for key, value in file.items():
        if key not in KEYS:
            near = nearest(str(key), KEYS)
            raise ConfigError(
                "accelerate does not know this key", where=path, found=key, wanted=near or listed(sorted(KEYS)),
                fix=f"remove it from {path.name}",
            )  # fmt: skip
        if key.endswith("_config") and not isinstance(value, dict | None):
            raise _refused(path, key, "a table", value)
    # YAML reads a bare `no` as false.
    bare = {"mixed_precision": "no", "distributed_type": "NO", "dynamo_backend": "NO"}
    return {key: bare.get(key, value) if value is False else value for key, value in file.items()}


def _choice(file: dict[str, Any], path: Path, key: str, choices: dict[str, str]) -> str:
    """What the file's value of the key stands for; empty without the key."""
    value = file.get(key)
    choice = str(value)
    if choice not in choices:
        choice = choice.lower()  # accelerate takes BF16 too
    if value is not None and choice not in choices:
        raise _refused(path, key, ", ".join(choices), value)
    return choices.get(choice, "")


def _refused(path: Path, key: str, wanted: str, found: object) -> ConfigError:
    return ConfigError(
        f"accelerate's {key} has a value that dray does not support", where=path, wanted=wanted,
        found=json.dumps(found), fix=f"correct {key} in {path.name}, or leave it out",
    )  # fmt: skip


def _strategy(file: dict[str, Any], path: Path, command: Command) -> dict[str, str]:
    kind = file.get("distributed_type")
    if kind is None:  # a part of a file
        sections = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
        kind = next((name for name, section in sections.items() if file.get(section)), None)
    if command.strategy:
        kind = {"ddp": "MULTI_GPU", "fsdp": "FSDP"}.get(command.strategy, "DEEPSPEED")
    elif command.deepspeed:
        kind = "DEEPSPEED"
    if kind == "DEEPSPEED":
        return _deepspeed(file.get("deepspeed_config") or {}, path, command)
    if kind == "FSDP":
        _require_fsdp2(file.get("fsdp_config") or {}, path)
    return {"strategy": _choice({"distributed_type": kind}, path, "distributed_type", _STRATEGIES)}


def _deepspeed(config: dict[str, Any], path: Path, command: Command) -> dict[str, str]:
    stage, file = config.get("zero_stage"), config.get("deepspeed_config_file")
    table: dict[str, str] = {}
    if isinstance(file, str):  # as accelerate does it: from where the program runs
        both = [key for key in _IN_DEEPSPEEDS if config.get(key) is not None]
        if both:
            raise ConfigError(
                "accelerate takes these keys from the DeepSpeed file only", where=f"{path}: deepspeed_config",
                wanted=f"deepspeed_config_file without {', '.join(both)}", found=", ".join(both),
                fix=f"move them to {file}",
            )  # fmt: skip
        table["deepspeed"] = str(Path(command.folder) / file)
    if not command.strategy and (stage is not None or not (table or command.deepspeed)):
        if type(stage) is not int or stage not in (1, 2, 3):
            raise ConfigError(
                "DeepSpeed's ZeRO stage is missing, or has a value that dray does not support",
                where=f"{path}: deepspeed_config.zero_stage", wanted="1, 2 or 3", found=json.dumps(stage),
                fix="zero_stage: 2",
            )  # fmt: skip
        table["strategy"] = f"zero{stage}"
    return table


def _require_fsdp2(config: dict[str, Any], path: Path) -> None:
    # accelerate takes names without the prefix too.
    version = config.get("fsdp_version", config.get("version", 1))
    if config and str(version) != "2":
        new = path.with_name(f"{path.stem}-fsdp2.yaml")
        line = f"accelerate to-fsdp2 --config_file {shlex.quote(str(path))} --output_file {shlex.quote(str(new))}"
        raise ConfigError(
            "the file is for FSDP1, which torch has replaced",
            where=f"{path}: fsdp_config.fsdp_version",
            wanted="fsdp_version: 2",
            found=f"{version}; accelerate's default is 1",
            fix=f"{line}\nand accelerate={shlex.quote(new.name)}",
        )
    for key, values in _FSDP2.items():
        value = config.get(f"fsdp_{key}", config.get(key))
        if value is not None and str(value).lower() not in values:
            raise _refused(path, f"fsdp_config.fsdp_{key}", ", ".join(values), value)
