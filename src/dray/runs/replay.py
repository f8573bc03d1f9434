"""Replay a run: its recipe as decided, with its nodes, ranks, threads and sbatch options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from dray import engines
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.contract import files, run_folder
from dray.contract.findings import ConfigError
from dray.images import store
from dray.planning.schema import Plan
from dray.runs import capsule, compare, submit
from dray.runs.capsule import Capsule
from dray.runs.compare import Difference, LossComparison
from dray.runs.store import Run, RunPaths, foreign_path, new_id, newest_attempt, plan_of

_STEM = "replay"
_THREADS = "OMP_NUM_THREADS"
_SCRIPTS = ("/multinode.sh", "/singlenode.sh")
# Options of sbatch that the replay sets itself, that concern other jobs or another time, or that hide the job's number.
_OWN = (
    "--parsable", "--output", "--nodes", "--gpus-per-node", "--dependency", "--no-kill", "--begin", "--deadline",
    "--array", "--wait", "--hold", "--test-only", "--quiet",
)  # fmt: skip
_SHORT = ("-o", "-N", "-d", "-k", "-b", "-a", "-W", "-H", "-Q")
# What is known only when the replay has ended, and what the replay itself sets.
_LATER = ("nodes", "transport", "keeping")


@dataclass(frozen=True)
class Original:
    """The run to repeat, or one attempt of it."""

    folder: Path
    paths: RunPaths
    """The newest attempt."""
    plan: Plan
    capsule: Capsule

    @property
    def recipe(self) -> Recipe:
        """The recipe as decided, with the same threads per rank, and without resuming, mirrors, requeues, trackers."""
        plan, recipe = self.plan, self.plan.recipe
        env = recipe.env
        threads = {node.threads for node in self.capsule.nodes} - {None}
        if len(threads) == 1 and _THREADS not in recipe.pass_env:
            env = {_THREADS: str(*threads), **env}
        changes: dict[str, Any] = {
            "scale": "whole", "tiny": {}, "env": env, "nodes": len(plan.world.nodes), "spares": 0, "max_requeues": 0,
            "checkpoint": recipe.checkpoint.model_copy(update={"folder": "", "mirror": ""}), "ranks_per_node": None,
        }  # fmt: skip
        if plan.variant == "cpu" and recipe.launcher != "ray":
            changes["ranks_per_node"] = plan.world.ranks_per_node
        if recipe.train:
            changes["train"] = recipe.train.model_copy(update={"trackers": ()})
        return recipe.model_copy(update=changes)

    @property
    def gpus(self) -> int:
        """GPUs per node."""
        return self.plan.world.ranks_per_node if self.plan.variant != "cpu" else 0

    def differences(self, paths: RunPaths, plan: Plan) -> list[Difference]:
        """What will differ in a replay with this plan, as far as this machine can tell."""
        found = compare.differences((self.plan, self.capsule), (plan, capsule.of(paths)))
        return [one for one in found if one.kind not in _LATER]


def original(folder: Path) -> Original:
    """The run in this folder, or its attempt if that is named."""
    paths = newest_attempt(folder)
    return Original(folder, paths, plan_of(paths), capsule.of(paths))


def foreign(run: Original) -> str:
    """Why the run may be another user's, whose recipe names code that nobody here has read; empty for an own run."""
    if not run.paths.secret.exists():
        return f"{run.folder}, a copy without {run_folder.SECRET}"
    return foreign_path(run.paths)


def require_own(run: Original) -> None:
    """Refuse to start another user's run, or a copy of one."""
    if found := foreign(run):
        raise ConfigError(
            "dray replays only your own runs", wanted="a run folder that only you may write", found=found,
            fix=f"dray replay {shlex.quote(str(run.folder))} --recipe again.toml; read it; then dray submit again.toml",
        )  # fmt: skip


def engine_here(plan: Plan, named: str) -> str:
    """The engine that starts the replay on this machine: the run's own, or the one that was named."""
    engine = named or ("" if plan.by_slurm else plan.engine)
    if engine not in engines.names("local"):
        raise ConfigError(
            "this run cannot be repeated on this machine as it was",
            wanted="sbatch, for a run of Slurm; else an engine of this machine", found=named or plan.engine,
            fix=f"dray replay {plan.run} --engine docker; or --recipe again.toml, to submit it elsewhere",
        )  # fmt: skip
    return engine


def same(found: LossComparison) -> bool:
    """Whether the replay logged the same loss for each step of the run."""
    return found.first is None and found.steps > 0 and not found.only_a


# As a job.


class JobOptions(NamedTuple):
    """The options of the run's own job."""

    options: tuple[str, ...]
    """Options of sbatch, without those for that job alone."""
    site: str = ""
    gpu_memory: float | None = None


def job_options(run: Path) -> JobOptions | None:
    """The options from the run's job.json. None if it is missing, as after a plain sbatch, or if others may have
    written it: options of sbatch name files that the job would overwrite."""
    submitted = Run(run).job
    if submitted is None or not files.is_own(run) or not files.is_own(run / run_folder.JOB):
        return None
    argv = submitted.argv[1:]
    options = list(takewhile(lambda word: not word.endswith(_SCRIPTS), argv))
    # The user's command, after --, may have options of the same name.
    ours = takewhile(lambda word: word.startswith("--") and word != "--", argv[len(options) + 1 :])
    decided = dict(word.split("=", 1) for word in ours)
    memory = decided.get("--gpu-memory")
    return JobOptions(tuple(_kept(options)), decided.get("--site", ""), float(memory) if memory else None)


def _kept(options: Sequence[str]) -> Iterator[str]:
    """The options that concern the replay, too. sbatch takes the beginning of a name, and a value as its own word."""
    dropped = False
    for option in options:
        if option.startswith("-") or not dropped:
            name = option.partition("=")[0]
            long = len(name) > len("--") and any(own.startswith(name) for own in _OWN)
            dropped = long if name.startswith("--") else name.startswith(_SHORT)
            dropped = dropped or option.startswith("--gres=gpu")
            if not dropped:
                yield option


def job(run: Original, runs: Path, more: Sequence[str]) -> submit.Job:
    """The replay with its sbatch command: the same GPUs, nodes and options; options in `more` win."""
    submit.check(more)
    recipe, before = run.recipe, job_options(run.paths.run)
    folder = runs / new_id(recipe.name)
    wanted = submit.Submission([str(folder / f"{_STEM}.toml")], gpus=run.gpus, options=more)
    if before:
        wanted = replace(wanted, before=before.options, site=before.site, gpu_memory=before.gpu_memory)
    planned = submit.planned(recipe, RunPaths(folder), wanted)
    store.required(dray_home.root(), recipe.image_name, recipe.image_digest, planned.plan.engine)
    return planned


def start(run: Original, made: submit.Job) -> int:
    """Submit the replay, with its recipe in its folder; the job's number."""
    recipe, source = run.recipe, run.capsule.source
    code = Path(source.folder) if source else run.folder
    return submit.submit(made.argv, Path(made.plan.run_folder), recipe.runs.share, code, as_files(recipe, _STEM))


# As a recipe.


def as_files(recipe: Recipe, stem: str, *, whole: bool = True) -> dict[str, str]:
    """The recipe as a file for dray submit, with the files that it names; the plan has their text.

    Without `whole`, keys with default values are left out.
    """
    table = recipe.model_dump(mode="json", exclude_none=True, exclude_unset=not whole)
    found = dict[str, str]()
    for part in (table, table.get("train", {}), table.get("command", {})):
        for key, name in (("deepspeed", f"{stem}.deepspeed.json"), ("accelerate", f"{stem}.accelerate.yaml")):
            if part.get(key):
                found[name], part[key] = part[key], name
    return {f"{stem}.toml": "\n".join([*_toml(table), ""]), **found}


def _toml(table: dict[str, Any], above: str = "") -> Iterator[str]:
    """A line for each key, as the command line spells it: train.lr = 0.001."""
    for key, value in table.items():
        name = above + (key if re.fullmatch("[A-Za-z0-9_-]+", key) else _json(key))
        if isinstance(value, dict):
            yield from _toml(value, f"{name}.")
        elif isinstance(value, str) and "\n" in value and "'''" not in value:
            yield f"{name} = '''\n{value}'''"  # such as the source of data.map, which the user is to read
        else:
            yield f"{name} = {_json(value)}"


def _json(value: object) -> str:
    """The value as TOML, which writes numbers, lists and strings of one line as JSON does."""
    return json.dumps(value, ensure_ascii=False)
