"""accelerate's configuration for a script: the user's own file, with what the recipe and the plan decide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.training import STRATEGIES, Strategy
from dray.contract.findings import Finding
from dray.planning.rule import Planned, note
from dray.planning.world import World

FILE, _DEEPSPEED = "accelerate.json", "deepspeed.json"
# The options of `accelerate launch`, the scheduler or the image decide these.
_DECIDED = (
    *("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "use_cpu"),
    *("enable_cpu_affinity", "mpirun_config"),
)
# In a user's file these leave the value open.
_OPEN: tuple[object, ...] = (None, "", {}, 0, -1)


def files(recipe: Recipe, folder: str) -> dict[str, str]:
    """The files that accelerate reads in the attempt's folder, by name."""
    configuration, command = _configuration(recipe), recipe.command
    if command is None or not command.deepspeed:
        return {FILE: _text(configuration)}
    # These are in the DeepSpeed file, and accelerate refuses them here.
    del configuration["mixed_precision"]
    config = configuration["deepspeed_config"]
    del config["zero_stage"], config["zero3_save_16bit_model"]
    config["deepspeed_config_file"] = f"{folder}/{_DEEPSPEED}"
    return {FILE: _text(configuration), _DEEPSPEED: command.deepspeed}


def _configuration(recipe: Recipe) -> dict[str, Any]:
    """The user's file with the recipe's strategy and precision."""
    command, file = recipe.command, _file(recipe)
    strategy, precision = _strategy(recipe), (command.precision if command else None) or "fp32"
    configuration: dict[str, Any] = {key: value for key, value in file.items() if key not in _DECIDED} | {
        "compute_environment": "LOCAL_MACHINE",
        # MULTI_GPU also on CPUs: NO and MULTI_CPU start one process and say nothing.
        "distributed_type": "MULTI_GPU",
        "mixed_precision": precision.replace("fp32", "no"),
        "rdzv_backend": "dray",
        "same_network": False,
    }
    if strategy == "fsdp":
        configuration |= {"distributed_type": "FSDP", "fsdp_config": _fsdp(file.get("fsdp_config") or {})}
    if STRATEGIES[strategy].deepspeed:
        stage = STRATEGIES[strategy].stage
        configuration["distributed_type"] = "DEEPSPEED"
        configuration["deepspeed_config"] = {
            "zero3_init_flag": stage == 3,
            "zero3_save_16bit_model": stage == 3,
            **(file.get("deepspeed_config") or {}),
            "zero_stage": stage,
            # Its default is pdsh, which starts the ranks by SSH and outside the container.
            "deepspeed_multinode_launcher": "standard",
        }
    return configuration


def _file(recipe: Recipe) -> dict[str, Any]:
    file: dict[str, Any] = json.loads(recipe.accelerate or "{}")
    return file


def _strategy(recipe: Recipe) -> Strategy:
    return (recipe.command.strategy if recipe.command else None) or "ddp"


def _fsdp(file: dict[str, Any]) -> dict[str, Any]:
    named = {key if key.startswith("fsdp") else f"fsdp_{key}": value for key, value in file.items()}
    return {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        **named,
        "fsdp_version": 2,  # accelerate's own default is 1
    }


def _text(configuration: dict[str, Any]) -> str:
    return json.dumps(configuration, indent=1) + "\n"


def advice(given: Planned) -> Iterator[Finding]:
    """Warn of settings that have no effect."""
    recipe = given.recipe
    if overridden := _overridden(recipe, given.plan.world):
        yield note(
            "accelerate's file has settings that the recipe or the plan decides",
            found=", ".join(f"{key} = {json.dumps(value)}" for key, value in overridden.items()),
            fix="remove them from the file; the recipe's nodes, port and [command], or --ranks, decide them",
        )
    strategy = _strategy(recipe)
    if strategy != "ddp" and ACCELERATORS[recipe.image] == "cpu":
        name = "DeepSpeed" if STRATEGIES[strategy].deepspeed else "FSDP"
        yield Finding(
            f"on a CPU accelerate silently ignores {name}",
            where="image = cpu",
            wanted=f"GPUs, for command.strategy = {strategy}",
            found="plain data parallelism: each rank has the whole model",
            fix="image=cuda, or command.strategy=ddp, which is the same here",
        )


def _overridden(recipe: Recipe, world: World) -> dict[str, object]:
    """The settings of the user's file for which the plan has other values."""
    configuration, file = _configuration(recipe), _file(recipe)
    planned = {
        **configuration.get("deepspeed_config", {}),
        "distributed_type": configuration["distributed_type"],
        "mixed_precision": configuration["mixed_precision"],
        "num_machines": len(world.nodes),
        "num_processes": world.size,
        "main_process_port": recipe.port,
        "gpu_ids": "all",
        "use_cpu": ACCELERATORS[recipe.image] == "cpu",
    }
    written = {**(file.get("deepspeed_config") or {}), **file}
    keys = (*_DECIDED, "distributed_type", "mixed_precision", "zero_stage", "deepspeed_multinode_launcher")
    return {key: written[key] for key in keys if written.get(key) not in (*_OPEN, planned.get(key))}
