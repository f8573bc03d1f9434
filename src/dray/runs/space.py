"""Where `dray tune` measures, and which candidates can run there; each is planned before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dray import engines
from dray.config.recipe import Recipe
from dray.config.sites import Choice
from dray.contract.findings import ConfigError, Finding, counted
from dray.facts import Engine, Facts
from dray.planning.schema import Plan
from dray.planning.tune_search import Candidate, applied
from dray.runs import local, login, write
from dray.runs.slurm import Allocation
from dray.runs.store import RunPaths

_LETTERS = 300


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of the command line."""

    nodes: int | None = None
    gpus_per_node: int = 0
    gpu_memory: float | None = None
    engine: Engine = "bare"
    on_this_machine: bool = False
    """Use this machine even inside an allocation."""
    site: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The nodes where all candidates run, one after another."""

    facts: Facts
    choice: Choice
    options: tuple[str, ...]
    """The options for `dray run`."""
    env: Mapping[str, str]

    def plan(self, recipe: Recipe, folder: Path) -> Plan:
        """The plan of a candidate, with its findings."""
        return write.decide(recipe, self.facts, self.choice, RunPaths(folder / "001"))

    def first(self, recipe: Recipe, folder: Path) -> Plan:
        """The plan of the recipe's own setting; if its micro-batch does not fit the ranks, of the largest that does."""
        try:
            return self.plan(recipe, folder)
        except ConfigError:
            free = recipe.batch and recipe.batch.model_copy(
                update={"per_device": None, "gradient_accumulation_steps": None}
            )
            return self.plan(recipe.model_copy(update={"batch": free}), folder)

    def refusal(self, recipe: Recipe, folder: Path) -> str:
        """Why the candidate cannot start, such as a model that is too large; empty if it can."""
        try:
            if engines.get(self.facts.engine).image == "python":
                local.require(recipe, lambda *_: "")
        except ConfigError as refused:
            return refused.problem
        try:
            found = [finding for finding in self.plan(recipe, folder).findings if finding.code]
        except ConfigError as refused:
            found = [refused.finding]
        return reason(found[0]) if found else ""


def reason(finding: Finding) -> str:
    """The refusal in one line."""
    lines = [finding.problem, *finding.found.splitlines()[:1], *finding.wanted.splitlines()[:1]]
    found, wanted = bool(finding.found), bool(finding.wanted)
    marks = ["", *(["found "] if found else []), *(["wanted "] if wanted else [])]
    return "; ".join(f"{mark}{line}" for mark, line in zip(marks, lines, strict=True))[:_LETTERS]


def place(recipe: Recipe, asked: Asked, env: Mapping[str, str]) -> Place:
    """The nodes of this shell's allocation, also inside a batch script; else this machine."""
    if task := env.get("SLURM_ARRAY_TASK_ID"):
        raise ConfigError(
            "every task of a job array would measure the same and write the same file",
            where=f"job {env.get('SLURM_ARRAY_JOB_ID', '')}_{task}", wanted="one job", found="a task of a job array",
            fix="use sbatch without --array",
        )  # fmt: skip
    env = {
        name: value for name, value in env.items() if name != "ENVIRONMENT"
    }  # it is no run of the batch script itself
    allocated = Allocation.of(env)
    in_a_step = env.get("SLURM_JOB_ID") and env.get("SLURM_STEP_ID") and not allocated
    if in_a_step and not asked.on_this_machine:
        raise ConfigError(
            "every task of an srun step would measure the same", where=f"step {env['SLURM_STEP_ID']}",
            wanted="one dray tune, which starts the tasks itself",
            fix="leave out srun, or use --local to measure on this machine only",
        )  # fmt: skip
    named = (f"--site={asked.site}",) if asked.site else ()
    if allocated and not asked.on_this_machine:
        return _allocated(recipe, asked, allocated, named, env)
    if asked.engine not in engines.names("local"):
        raise ConfigError(
            f"dray tune cannot use --engine {asked.engine} here", wanted=f"one of {', '.join(engines.names('local'))}",
            found=asked.engine, fix="leave out --engine; inside salloc the site's engine is used",
        )  # fmt: skip
    gpus = asked.gpus_per_node or (recipe.ranks_per_node or 0 if recipe.image != "cpu" else 0)
    facts = local.facts(
        recipe, engine=asked.engine, image=local.image_of(asked.engine, recipe), nodes=asked.nodes, gpus_per_node=gpus,
        site=asked.site,
    )  # fmt: skip
    facts, choice = write.at_site(facts.model_copy(update={"gpu_memory_gb": asked.gpu_memory}))
    options = (f"--nodes={facts.nodes}", f"--gpus-per-node={gpus}", f"--engine={asked.engine}", *named)
    return Place(facts=facts, choice=choice, options=options, env=env)


def _allocated(
    recipe: Recipe, asked: Asked, allocated: Allocation, named: tuple[str, ...], env: Mapping[str, str]
) -> Place:
    """The nodes of the allocation, with the facts that slurm/probe.sh finds in a job."""
    allocated.require_nodes(asked.nodes)
    if asked.gpus_per_node:
        raise ConfigError(
            "--gpus-per-node is set by salloc; --ranks sets the number of ranks", fix="leave out --gpus-per-node"
        )
    gpus = (env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_GPUS_PER_NODE") or "0").rpartition(":")[2]
    facts, choice = login.facts(
        recipe, int(allocated.nodes), 0, asked.site, ranks=None, options=(), gpu_memory=asked.gpu_memory
    )
    given = {"login": "", "nodelist": allocated.nodelist, "gpus_per_node": int(gpus) if gpus.isdecimal() else 0}
    facts = facts.model_copy(update={**given, "job": int(allocated.job) if allocated.job.isdecimal() else 0})
    return Place(facts=facts, choice=choice, options=named, env=env)


def text(plan: Plan, place: Place) -> str:
    """Where the candidates were measured, for the reader."""
    ranks, nodes = counted(plan.world.size, "rank"), counted(len(plan.world.nodes), "node")
    job = f" of job {place.facts.job}" if place.facts.job else ""
    return f"{ranks} on {nodes}{job} ({plan.engine}, {plan.site})"


def short(recipe: Recipe, candidate: Candidate, start: Candidate, *, ranks: int, steps: int, checked: bool) -> Recipe:
    """The recipe with a candidate's setting for some steps, without checkpoints, evaluation and restarts."""
    made = applied(recipe, candidate, start, ranks=ranks)
    table = made.model_dump(mode="json", exclude_unset=True)
    assert made.train is not None
    train = table["train"] | {
        "steps": steps, "warmup_steps": min(made.train.warmup_steps, steps), "log_every": 1, "eval_every": 0,
        "trackers": [], "profile": "",
    }  # fmt: skip
    data = table.get("data", {}) | {"max_eval_samples": 1}
    for part, keys in ((train, ("epochs",)), (table, ("scale", "tiny", "evaluate")), (data, ("test",))):
        for key in keys:
            part.pop(key, None)
    own = {"train": train, "data": data, "checkpoint": {"final": False}, "max_requeues": 0, "max_restarts": 0}
    own |= {} if checked else {"preflight": {"when": "never"}}
    return Recipe.model_validate_json(json.dumps(table | own))
