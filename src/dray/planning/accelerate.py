"""accelerate's configuration for a script: made from the plan and [command], on top of the user's own file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.training import STRATEGIES, Strategy
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.planning.world import World

FILE, _DEEPSPEED = "accelerate.json", "deepspeed.json"
# The launcher's options set these.
_OPTIONS = ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port")


def files(recipe: Recipe, folder: str) -> dict[str, str]:
    """The files that accelerate reads in the attempt's folder, by name."""
    command, own = recipe.command, json.loads(recipe.accelerate or "{}")
    strategy, precision = _strategy(recipe), command.precision if command else None
    made: dict[str, Any] = {key: value for key, value in own.items() if key not in _OPTIONS} | {
        "compute_environment": "LOCAL_MACHINE",
        # MULTI_GPU also on CPUs: NO and MULTI_CPU start one process and say nothing.
        "distributed_type": "MULTI_GPU",
        "mixed_precision": (precision or "fp32").replace("fp32", "no"),
        "rdzv_backend": "dray",
        "same_network": False,
    }
    if strategy == "fsdp":
        made |= {"distributed_type": "FSDP", "fsdp_config": _fsdp(own.get("fsdp_config") or {})}
    if not STRATEGIES[strategy].deepspeed:
        return {FILE: _text(made)}
    assert command is not None
    stage = STRATEGIES[strategy].stage
    # Its default is pdsh, which starts the ranks by SSH and outside the container.
    config = {"deepspeed_multinode_launcher": "standard", "zero3_init_flag": stage == 3}
    config |= own.get("deepspeed_config") or {}
    made |= {"distributed_type": "DEEPSPEED", "deepspeed_config": config}
    if not command.deepspeed:
        made["deepspeed_config"] = {"zero3_save_16bit_model": stage == 3, **config, "zero_stage": stage}
        return {FILE: _text(made)}
    # Both are in the DeepSpeed file, and accelerate refuses them here.
    del made["mixed_precision"]
    config.pop("zero_stage", None)
    config["deepspeed_config_file"] = f"{folder}/{_DEEPSPEED}"
    return {FILE: _text(made), _DEEPSPEED: command.deepspeed}


def _strategy(recipe: Recipe) -> Strategy:
    return (recipe.command.strategy if recipe.command else None) or "ddp"


def _fsdp(own: dict[str, Any]) -> dict[str, Any]:
    named = {key if key.startswith("fsdp") else f"fsdp_{key}": value for key, value in own.items()}
    return {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        **named,
        "fsdp_version": 2,  # accelerate's own default is 1
    }


def _text(made: dict[str, Any]) -> str:
    return json.dumps(made, indent=1) + "\n"


def refusals(recipe: Recipe, world: World) -> Iterator[Finding]:
    """Refuse settings of the user's file that contradict the plan."""
    own = json.loads(recipe.accelerate or "{}")
    nodes, size, cpu = len(world.nodes), world.size, ACCELERATORS[recipe.image] == "cpu"
    same = f"start as many nodes: nodes={own.get('num_machines')}"
    planned: tuple[tuple[str, tuple[object, ...], str, str], ...] = (
        ("num_machines", (nodes,), f"{nodes}, the nodes of the plan", same),
        ("num_processes", (size, -1), f"{size}, the ranks of the plan on all nodes", ""),
        ("machine_rank", (0,), "none: one file serves all nodes, and each has its own rank", ""),
        ("main_process_ip", (), "none: the first node tells its address at the rendezvous", ""),
        ("main_process_port", (0, recipe.port), "0 or the recipe's port", f"port={own.get('main_process_port')}"),
        ("rdzv_backend", ("static", "c10d", "dray"), "static: dray uses a backend of its own", ""),
        ("gpu_ids", ("all",), "all: the scheduler says which GPUs a node has", ""),
        ("use_cpu", (cpu, False), "false: the image is for GPUs", "image=cpu"),
        ("enable_cpu_affinity", (False,), "false: dray binds each rank to its cores", ""),
        ("mpirun_config", (), "none: no mpirun starts the ranks", ""),
    )
    launcher = (own.get("deepspeed_config") or {}).get("deepspeed_multinode_launcher", "standard")
    for key, values, wanted, other in planned:
        found = own.get(key)
        if found not in (None, {}, "") and not any(found == value and type(found) is type(value) for value in values):
            yield _contradiction(key, wanted, found, other)
    if launcher != "standard":
        yield _contradiction("deepspeed_multinode_launcher", "standard: nothing goes by SSH", launcher, "")


def _contradiction(key: str, wanted: str, found: object, other: str) -> Finding:
    return Finding(
        f"accelerate's file contradicts the plan: {key}",
        where=f"accelerate: {key}",
        wanted=wanted,
        found=json.dumps(found),
        fix=f"remove {key} from the file{f', or {other}' if other else ''}",
        code=exit_codes.CONFIG,
    )


def advice(recipe: Recipe) -> Iterator[Finding]:
    """Warn of settings that accelerate silently ignores."""
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
