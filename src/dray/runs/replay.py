"""Replay a run from its capsule: the recipe as decided, and the differences that remain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from dray import engines
from dray.config.image_definition import ACCELERATORS
from dray.config.recipe import Recipe
from dray.contract import hardware
from dray.contract.findings import ConfigError, counted
from dray.planning.schema import Plan
from dray.runs import capsule
from dray.runs import diff as differ
from dray.runs.capsule_schema import Capsule, Node
from dray.runs.diff import Difference
from dray.runs.effect import Parting
from dray.runs.store import RunPaths
from dray.runs.write import read

# Differences that do not change the losses.
_KINDS = ("keeping", "launch")
_NODES = {
    "names", "started by", "site", "memory_gb", "kernel", "cpus", "numa", "cores_of_ranks", "world.one_machine",
    "world.shared_folder", "world.cores",
}  # fmt: skip
_IMAGE = {"engine", "image", "signers"}  # if its digest and packages are the same
_NUMERIC = {
    "accelerate", "aihwkit-lightning", "datasets", "deepspeed", "dray", "numpy", "peft", "python", "libc", "tokenizers",
    "torch", "transformers", "triton",
}  # fmt: skip
_THREADS = "OMP_NUM_THREADS"


def recipe_of(plan: Plan, made: Capsule) -> Recipe:
    """The recipe as decided, with the same threads per rank, and without resuming, mirrors, requeues and trackers."""
    recipe = plan.recipe
    checkpoint = recipe.checkpoint.model_copy(update={"folder": "", "mirror": ""})
    given = {node.threads for node in made.nodes} - {None}
    threads = {_THREADS: str(*given)} if len(given) == 1 and _THREADS not in recipe.pass_env else {}
    changes: dict[str, Any] = {
        "scale": "whole", "tiny": {}, "checkpoint": checkpoint, "env": {**threads, **recipe.env},
        "nodes": len(plan.world.nodes), "spares": 0, "max_requeues": 0,
        "ranks_per_node": plan.world.ranks_per_node if plan.variant == "cpu" and recipe.launcher != "ray" else None,
    }  # fmt: skip
    if recipe.train:
        changes["train"] = recipe.train.model_copy(update={"trackers": ()})
    return recipe.model_copy(update=changes)


def require_here(plan: Plan, engine: str) -> str:
    """The engine for this machine: the run's own, or the one that was named."""
    own, known = engine or plan.engine, engines.names("local")
    if engine and own not in known:
        raise ConfigError("--engine has a wrong value", wanted=f"one of {', '.join(known)}", found=engine)
    if not engine and (plan.by_slurm or own not in known):
        raise ConfigError(
            "this run was started by Slurm" if plan.by_slurm else "this run used several machines",
            where=plan.run,
            wanted="Slurm's sbatch, an engine for this machine, or --recipe FILE to submit it elsewhere",
            found=f"engine {plan.engine}, {counted(len(plan.world.nodes), 'node')}",
            fix=f"run this on a login node; add --engine docker or --engine bare; or dray replay {plan.run} --recipe "
            "again.toml",
        )
    return own


def differences(before: tuple[Plan, Capsule], paths: RunPaths, plan: Plan, *, ended: bool) -> list[Difference]:
    """What differs in the replay; before it has started, as far as this machine can tell."""
    made = capsule.of(paths, plan)
    if not ended:
        own = engines.get(plan.engine).image == "python"
        seen = hardware.look(ACCELERATORS[plan.variant], {}, packages=own)
        packages = seen.pop("packages", {})
        if not own:  # these belong to the image, and its nodes will record them
            seen |= {"python": "", "libc": ""}
        here = Node.model_validate({"node": 0, "name": "", **seen})
        image = made.image.model_copy(update={"packages": packages})
        made = made.model_copy(update={"nodes": (here,), "image": image, "torch": packages.get("torch", "")})
    return [one for one in differ.differences(before, (plan, made)) if not _meant(one)]


def _meant(one: Difference) -> bool:
    """Whether the replay itself sets or removes this."""
    threads = one.kind == "environment" and one.name == _THREADS and one.a == differ.ABSENT
    return threads or (
        one.kind == "keeping" and one.name.startswith(("checkpoint.", "spares", "max_requeues", "train.tr"))
    )


def worlds(attempts: Iterable[RunPaths], plan: Plan) -> list[Difference]:
    """The attempts with another number of ranks, whose sums a replay adds in another order."""
    found = []
    for paths in attempts:
        if paths.plan.is_file() and (size := read(paths).world.size) != plan.world.size:
            name = f"ranks of attempt {paths.attempt}"
            found.append(Difference(kind="nodes", name=name, a=str(size), b=str(plan.world.size)))
    return found


def breaks(found: Iterable[Difference], recipe: Recipe, made: Capsule) -> list[str]:
    """Why losses may differ; empty if they must be bit-identical."""
    why = [] if made.image.packages and made.nodes else ["versions: the run recorded no packages or no nodes"]
    for one in found:
        if one.kind in _KINDS or (one.kind == "nodes" and one.name in _NODES):
            continue
        if one.kind == "versions" and one.name not in _NUMERIC:
            continue
        if (one.kind == "code" and not recipe.command) or (one.kind == "image" and one.name in _IMAGE):
            continue
        why.append(f"{one.kind}: {one.name}: {one.a} -> {one.b}")
    if recipe.train and not recipe.train.deterministic and recipe.image != "cpu":
        why.append("training: train.deterministic is false, and this is a GPU")
    return why


def same(found: Parting) -> bool:
    """Whether the replay logged the same loss for each step of the run."""
    return found.first is None and found.steps > 0 and not found.only_a


def as_files(recipe: Recipe, stem: str, *, whole: bool = True) -> dict[str, str]:
    """The recipe as a file for dray submit, with the files that it names; the plan has their text.

    Without `whole`, keys with default values are left out.
    """
    table = recipe.model_dump(mode="json", exclude_none=True, exclude_unset=not whole)
    files = dict[str, str]()
    for part, key in (
        (table.get("train", {}), "deepspeed"),
        (table.get("command", {}), "deepspeed"),
        (table, "accelerate"),
    ):
        if text := part.get(key):
            part[key] = f"{stem}.{key}.{'json' if key == 'deepspeed' else 'yaml'}"
            files[part[key]] = text
    return {f"{stem}.toml": "\n".join(_toml(table)) + "\n", **files}


def _toml(table: dict[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    yield from (f"{_key(key)} = {_value(value)}" for key, value in plain.items())
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield f"\n[{_key(key)}]"
            yield from (f"{_key(name)} = {_value(one)}" for name, one in value.items())


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: Any) -> str:  # noqa: ANN401  any JSON value
    """The value as TOML, which writes numbers, lists and strings of one line as JSON does."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str) and "\n" in value:  # such as the source of data.map, which the user is to read
        lines = [_json(line)[1:-1].replace('\\"', '"') for line in value.split("\n")]
        return '"""\n' + "\n".join(lines).replace('"""', '""\\"') + '"""'
    return _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
