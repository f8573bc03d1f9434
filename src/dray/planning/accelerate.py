"""accelerate's configuration for a script: the user's own file, with what the recipe and the plan decide."""

from __future__ import annotations

import json
from typing import Any

from dray.config.recipe import Command, Recipe
from dray.config.training import STRATEGIES

FILE, _DEEPSPEED = "accelerate.json", "deepspeed.json"
# The scheduler or the image decides these, and no option of dray's beats them.
_LEFT_OUT = ("gpu_ids", "use_cpu", "enable_cpu_affinity", "mpirun_config")


def files(recipe: Recipe, folder: str) -> dict[str, str]:
    """The files that accelerate reads in the attempt's folder, by name: the user's, with strategy and precision.

    The number of machines and ranks and their addresses are options of its command line, which beat its file.
    """
    command = recipe.command or Command(argv=("train",))  # dray's own trainer configures itself
    given = json.loads(recipe.accelerate or "{}")
    strategy = command.strategy or "ddp"
    made: dict[str, Any] = {key: value for key, value in given.items() if key not in _LEFT_OUT} | {
        "compute_environment": "LOCAL_MACHINE",
        # MULTI_GPU also on CPUs: NO and MULTI_CPU start one process and say nothing.
        "distributed_type": "MULTI_GPU",
        "mixed_precision": (command.precision or "no").replace("fp32", "no"),
        "rdzv_backend": "dray",
        "same_network": False,
    }
    if strategy == "fsdp":
        own = given.get("fsdp_config") or {}
        config = {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            **{key if key.startswith("fsdp") else f"fsdp_{key}": value for key, value in own.items()},
            "fsdp_version": 2,  # accelerate's own default is 1
        }
        made |= {"distributed_type": "FSDP", "fsdp_config": config}
    if STRATEGIES[strategy].deepspeed:
        stage = STRATEGIES[strategy].stage
        config = {
            "zero3_init_flag": stage == 3,
            "zero3_save_16bit_model": stage == 3,
            **(given.get("deepspeed_config") or {}),
            "zero_stage": stage,
            # Its default is pdsh, which starts the ranks by SSH and outside the container.
            "deepspeed_multinode_launcher": "standard",
        }
        made |= {"distributed_type": "DEEPSPEED", "deepspeed_config": config}
        if command.deepspeed:
            # These are in the DeepSpeed file, and accelerate refuses them here.
            del made["mixed_precision"], config["zero_stage"], config["zero3_save_16bit_model"]
            config["deepspeed_config_file"] = f"{folder}/{_DEEPSPEED}"
    texts = {FILE: json.dumps(made, indent=1) + "\n"}
    return {**texts, _DEEPSPEED: command.deepspeed} if command.deepspeed else texts
