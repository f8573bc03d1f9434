"""Replay a run: its recipe as decided, with its nodes, ranks, threads and sbatch options, and what will differ."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from dray.runs import capsule, compare, status, submit, trust
from dray.runs.capsule import Capsule
from dray.runs.compare import ABSENT, Difference, LossComparison
from dray.runs.store import Run, RunPaths, is_run, last_attempt, new_id, plan_of

_STEM = "replay"
_THREADS = "OMP_NUM_THREADS"
_SCRIPTS = ("/multinode.sh", "/singlenode.sh")
# Options of sbatch that the replay sets itself, that concern other jobs or another time, or that hide the job's number.
_OWN = (
    "--parsable", "--output", "--nodes", "--gpus-per-node", "--dependency", "--no-kill", "--begin", "--deadline",
    "--array", "--wait", "--hold", "--test-only", "--quiet",
)  # fmt: skip
_SHORT = ("-o", "-N", "-d", "-k", "-b", "-a", "-W", "-H", "-Q", "--gres=gpu")
# What the replay itself sets or removes.
_SET = ("checkpoint.", "spares", "max_requeues", "train.trackers")
# Facts about nodes that are known before the start.
_KNOWN = ("site", "world.size", "world.ranks_per_node")
# What does not change the losses: facts about nodes, and the image's name and engine if it has the same packages.
_HARMLESS = (
    "image", "engine", "signers", "nodes", "site", "node.memory_gb", "node.kernel", "node.cpus", "node.numa",
    "node.cores_of_ranks", "world.one_machine", "world.shared_folder", "world.cores",
)  # fmt: skip


@dataclass(frozen=True)
class Original:
    """The run to repeat."""

    folder: Path
    attempts: list[RunPaths]
    plan: Plan
    capsule: Capsule
    recipe: Recipe
    """The recipe as decided, without resuming, mirrors, requeues and trackers."""

    @property
    def paths(self) -> RunPaths:
        """The newest attempt."""
        return self.attempts[-1]

    def differences(self, paths: RunPaths, plan: Plan, *, started: bool) -> list[Difference]:
        """What differs in the replay; before it has started, as far as this machine can tell."""
        found = compare.differences((self.plan, self.capsule), (plan, capsule.of(paths, plan)))
        found = [*self._other_sizes(plan), *found]
        found = [one for one in found if not (one.kind == "keeping" and one.name.startswith(_SET))]
        found = [one for one in found if (one.name, one.a) != (_THREADS, ABSENT)]
        if started:
            return found
        known = [one for one in found if one.kind not in ("nodes", "transport") or one.name in _KNOWN]
        return [one for one in known if (one.name, one.b) != ("image_sha256", ABSENT)]

    def _other_sizes(self, plan: Plan) -> Iterator[Difference]:
        """The attempts with another number of ranks, whose sums a replay adds in another order."""
        for paths in self.attempts:
            size = plan_of(paths).world.size
            if size != plan.world.size:
                name = f"ranks of attempt {paths.attempt}"
                yield Difference(kind="nodes", name=name, a=str(size), b=str(plan.world.size))


def original(folder: Path) -> Original:
    """The run in this folder, or its attempt if that is named."""
    attempts = [paths for paths in compare.attempts_of(folder) if paths.plan.is_file()]
    plan = plan_of(attempts[-1])
    made = capsule.of(attempts[-1], plan)
    return Original(folder, attempts, plan, made, recipe_of(plan, made))


def recipe_of(plan: Plan, made: Capsule) -> Recipe:
    """The recipe as decided, with the same threads per rank, and without resuming, mirrors, requeues and trackers."""
    recipe = plan.recipe
    env = recipe.env
    threads = {node.threads for node in made.nodes} - {None}
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


def require_own(run: Original) -> None:
    """Refuse to start another user's run, or a copy of one: its recipe names code that this user has not read."""
    found = trust.foreign(run.paths)
    if not run.paths.secret.exists():
        found = f"{run.folder}, a copy without {run_folder.SECRET}"
    if found:
        raise ConfigError(
            "dray replays only your own runs", wanted="a run folder that only you may write", found=found,
            fix=f"dray replay {shlex.quote(str(run.folder))} --recipe again.toml; read it; then dray submit again.toml",
        )  # fmt: skip


def engine_here(plan: Plan, named: str) -> str:
    """The engine that starts the replay on this machine: the run's own, or the one that was named."""
    engine = named or ("" if plan.by_slurm else plan.engine)
    if engine not in engines.names("local"):
        raise ConfigError(
            "this run cannot be repeated on this machine as it was", where=plan.run,
            wanted="sbatch, for a run of Slurm; else an engine of this machine", found=named or plan.engine,
            fix=f"dray replay {plan.run} --engine docker; or --recipe again.toml, to submit it elsewhere",
        )  # fmt: skip
    return engine


# What a replay promises.


def breaks(found: Sequence[Difference], run: Original) -> list[str]:
    """Why losses may differ; empty if they must be bit-identical."""
    recipe, why = run.recipe, []
    if not run.capsule.image.packages or not run.capsule.nodes:
        why.append("versions: the run recorded no packages or no nodes")
    for one in found:
        if one.kind in ("keeping", "launch") or one.name in _HARMLESS:
            continue
        if one.kind != "code" or recipe.command:
            why.append(compare.line(one).strip())
    if recipe.train and not recipe.train.deterministic and recipe.image != "cpu":
        why.append("training: train.deterministic is false, and this is a GPU")
    return why


def same(found: LossComparison) -> bool:
    """Whether the replay logged the same loss for each step of the run."""
    return found.first is None and found.steps > 0 and not found.only_a


# As a job.


class JobOptions(NamedTuple):
    """The options of the run's own job."""

    options: tuple[str, ...] = ()
    """Options of sbatch, without those for that job alone."""
    site: str = ""
    gpu_memory: float | None = None


def job_options(run: Path) -> JobOptions | None:
    """The options from the run's job.json. None if it is missing, as after a plain sbatch, or if others may have
    written it: options of sbatch name files that the job would overwrite."""
    submitted = Run(run).job
    if submitted is None or not files.is_own(run) or not files.is_own(run / run_folder.JOB):
        return None
    argv = submitted.argv
    script = next((place for place, word in enumerate(argv) if word.endswith(_SCRIPTS)), len(argv))
    # The user's own words follow the recipe or `--`.
    own = takewhile(lambda word: word.startswith("--") and word != "--", argv[script + 1 :])
    decided = {name: value for name, _, value in (word.partition("=") for word in own)}
    memory = decided.get("--gpu-memory")
    return JobOptions(tuple(_kept(argv[1:script])), decided.get("--site", ""), float(memory) if memory else None)


def _kept(options: Sequence[str]) -> Iterator[str]:
    """The options without those in `_OWN`, which sbatch takes by the beginning of their names, and without their
    values."""
    dropped = False
    for option in options:
        if dropped and not option.startswith("-"):
            continue
        name = option.partition("=")[0]
        dropped = option.startswith(_SHORT)
        if name.startswith("--") and len(name) > len("--"):
            dropped = dropped or any(own.startswith(name) for own in _OWN)
        if not dropped:
            yield option


def job(run: Original, runs: Path, more: Sequence[str]) -> submit.Job:
    """The replay with its sbatch command: the same GPUs, nodes and options; options in `more` win."""
    submit.check(more)
    before, folder = job_options(run.paths.run), runs / new_id(run.recipe.name)
    old = before or JobOptions()
    wanted = submit.Submission(
        [str(folder / f"{_STEM}.toml")], gpus=gpus_of(run.plan), site=old.site, gpu_memory=old.gpu_memory, options=more,
        before=before.options if before else None,
    )  # fmt: skip
    planned = submit.planned(run.recipe, RunPaths(folder), wanted)
    recipe = planned.plan.recipe
    store.required(dray_home.root(), recipe.image_name, recipe.image_digest, planned.plan.engine)
    return planned


def gpus_of(plan: Plan) -> int:
    """GPUs per node."""
    return plan.world.ranks_per_node if plan.variant != "cpu" else 0


def start(run: Original, made: submit.Job) -> int:
    """Submit the replay, with its recipe in its folder; the job's number."""
    recipe = run.recipe
    code = Path(recipe.command.folder) if recipe.command else dray_home.root()
    return submit.submit(made.argv, Path(made.plan.run_folder), recipe.runs.share, code, as_files(recipe, _STEM))


def require_ended(folder: Path) -> None:
    """Refuse to compare a replay that still waits or runs: some losses are missing."""
    run = folder if is_run(folder) else last_attempt(folder).run
    state = status.status(run)
    if state.kind in ("queued", "starting", "running"):
        raise ConfigError(
            "the replay has not ended", where=run, wanted="a run that has ended", found=state.where,
            fix=f"wait for its end with dray top {shlex.quote(str(run))}, then run this again",
        )  # fmt: skip


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
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
