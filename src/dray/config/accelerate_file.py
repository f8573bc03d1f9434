"""A user's configuration file for accelerate: it decides what [command] leaves out.

It is read with PyYAML's safe loader, as accelerate itself reads it, so that both see the same; that loader takes JSON.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from dray.config.model import validate
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
    "fsdp_reshard_after_forward": ("true", "false"),
    "fsdp_auto_wrap_policy": ("transformer_based_wrap", "size_based_wrap", "no_wrap"),
    "fsdp_state_dict_type": ("sharded_state_dict", "full_state_dict"),
}
# Beside a DeepSpeed file accelerate refuses these, on each node.
_IN_DEEPSPEEDS = (
    "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip


def completed(recipe: Recipe, text: str, path: Path) -> Recipe:
    """The recipe with the values of the file that [command] leaves out, and the file as JSON."""
    file = _parsed(text, path)
    unknown = sorted(file.keys() - KEYS)
    if unknown:
        near = nearest(unknown[0], KEYS)
        raise ConfigError(
            "accelerate does not know this key", where=path, found=", ".join(unknown),
            wanted=listed(sorted(KEYS, key=lambda key: (key != near, key))), fix=f"remove it from {path.name}",
        )  # fmt: skip
    if file.get("compute_environment") not in (None, "LOCAL_MACHINE"):
        raise _refused(path, "compute_environment", "LOCAL_MACHINE", file["compute_environment"])
    command = recipe.command
    assert command is not None
    precision = {} if command.precision else _precision(file, path)
    table = recipe.model_dump(exclude_unset=True)
    table["command"] = {**precision, **_strategy(file, path, command), **table["command"]}
    table["accelerate"] = json.dumps(file)
    return validate(Recipe, table, what=f"the recipe with {path}")


def _parsed(text: str, path: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415  only here

    try:
        file = yaml.safe_load(text)
        json.dumps(file, allow_nan=False)
    except (
        yaml.YAMLError,
        RecursionError,
        TypeError,
        ValueError,
    ) as wrong:  # a date, or NaN, is nothing of accelerate's
        raise ConfigError("accelerate's file is not valid YAML", where=path, found=wrong) from wrong
    if not isinstance(file, dict):
        raise ConfigError(
            "accelerate's file is not a table", where=path, wanted="key: value", found=type(file).__name__,
            fix="accelerate config --config_file FILE writes one",
        )  # fmt: skip
    for key, value in file.items():
        if str(key).endswith("_config") and not isinstance(value, dict | None):
            raise _refused(path, key, "a table", value)
    # YAML reads a bare `no` as false.
    bare = {"mixed_precision": "no", "distributed_type": "NO", "dynamo_backend": "NO"}
    return {str(key): bare.get(key, value) if value is False else value for key, value in file.items()}


def _refused(path: Path, key: str, wanted: str, found: object, fix: str = "") -> ConfigError:
    return ConfigError(
        f"accelerate's {key} has a value that dray does not support", where=path, wanted=wanted,
        found=json.dumps(found), fix=fix or f"write {key}: {wanted.partition(',')[0]}",
    )  # fmt: skip


def _precision(file: dict[str, Any], path: Path) -> dict[str, str]:
    written = file.get("mixed_precision")
    if written is None:
        return {}
    if not isinstance(written, str) or written.lower() not in _PRECISIONS:
        raise _refused(path, "mixed_precision", ", ".join(_PRECISIONS), written)
    return {"precision": _PRECISIONS[written.lower()]}


def _strategy(file: dict[str, Any], path: Path, command: Command) -> dict[str, str]:
    match _type(file, command):
        case None:
            return {}
        case "NO" | "MULTI_GPU" | "MULTI_CPU":
            return {"strategy": "ddp"}
        case "FSDP":
            _refuse_fsdp1(file.get("fsdp_config") or {}, path)
            return {"strategy": "fsdp"}
        case "DEEPSPEED":
            return _deepspeed(file.get("deepspeed_config") or {}, path, command)
        case other:
            raise _refused(path, "distributed_type", "MULTI_GPU, FSDP, DEEPSPEED", other)


def _type(file: dict[str, Any], command: Command) -> object:
    """The distributed_type: what [command] decides, else the file's own."""
    if command.strategy:
        return {"ddp": "MULTI_GPU", "fsdp": "FSDP"}.get(command.strategy, "DEEPSPEED")
    if command.deepspeed:
        return "DEEPSPEED"
    kind = file.get("distributed_type")
    if kind is None:  # a part of a file
        sections = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
        kind = next((name for name, section in sections.items() if file.get(section)), None)
    return kind


def _deepspeed(config: dict[str, Any], path: Path, command: Command) -> dict[str, str]:
    stage, file = config.get("zero_stage"), config.get("deepspeed_config_file")
    table: dict[str, str] = {}
    if stage is not None and not command.strategy:
        if stage not in (1, 2, 3):
            raise _refused(path, "deepspeed_config.zero_stage", "1, 2, 3", stage)
        table["strategy"] = f"zero{int(stage)}"
    if file is not None:
        both = [key for key in _IN_DEEPSPEEDS if config.get(key) is not None]
        if both or not isinstance(file, str):
            raise ConfigError(
                "accelerate takes these keys from the DeepSpeed file only", where=f"{path}: deepspeed_config",
                wanted=f"a path and none of {', '.join(_IN_DEEPSPEEDS)}", found=", ".join(both) or json.dumps(file),
                fix=f"move them to {file}" if both else 'write deepspeed_config_file: "zero2.json"',
            )  # fmt: skip
        # As accelerate does it: from where the program runs.
        table["deepspeed"] = str(Path(command.folder) / file)
    if not table and not command.strategy and not command.deepspeed:
        raise ConfigError(
            "DeepSpeed's ZeRO stage is missing", where=path,
            wanted="deepspeed_config.zero_stage of 1, 2 or 3, or command.strategy of zero1, zero2 or zero3",
            found="nothing", fix="set one of them",
        )  # fmt: skip
    return table


def _refuse_fsdp1(config: dict[str, Any], path: Path) -> None:
    # accelerate takes names without the prefix too.
    named = {key if str(key).startswith("fsdp") else f"fsdp_{key}": value for key, value in config.items()}
    if named and str(named.get("fsdp_version", 1)) != "2":
        new = path.with_name(f"{path.stem}-fsdp2.yaml")
        line = f"accelerate to-fsdp2 --config_file {shlex.quote(str(path))} --output_file {shlex.quote(str(new))}"
        raise ConfigError(
            "the file is for FSDP1, which torch has replaced",
            where=f"{path}: fsdp_config.fsdp_version",
            wanted="fsdp_version: 2",
            found=f"fsdp_version: {json.dumps(named['fsdp_version'])}"
            if "fsdp_version" in named
            else "none, which is 1",
            fix=f"{line}\nand accelerate={shlex.quote(new.name)}",
        )
    for key, values in _FSDP2.items():
        if key in named and str(named[key]).lower() not in values:
            raise _refused(path, f"fsdp_config.{key}", ", ".join(values), named[key])
