"""Run one job of a recipe in the image on this machine, before its run or after it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import engines
from dray.config.image_definition import ACCELERATORS
from dray.config.recipe import Command, Preflight, Recipe
from dray.contract import node
from dray.contract.findings import ConfigError, Finding
from dray.contract.trainer import image_tasks
from dray.facts import Engine
from dray.planning.schema import Plan
from dray.runs import local, prepare, store
from dray.runs.finish import finish
from dray.runs.logs import Output
from dray.runs.store import RunPaths, new_id, newest_attempt
from dray.runs.trust import foreign

_NETWORK = ("HF_ENDPOINT", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def trained(run: Path, *, trust: bool = False) -> tuple[Plan, RunPaths]:
    """The plan of a run of dray's trainer, and its newest attempt.

    For another user's run, settings that decide which code runs here are removed, unless you trust the run.
    """
    paths = newest_attempt(run)
    plan = store.plan_of(paths)
    recipe = plan.recipe
    if recipe.command:
        raise ConfigError(
            "this run started a command, and dray knows only the models of its own trainer",
            where=paths.run,
            wanted="a run of a recipe with [train]",
            found=f"the command {recipe.command.argv[0]}",
            fix="load the model with your own program",
        )
    found = "" if trust else foreign(paths)
    if found:
        ignored = Finding(
            "the run is another user's, so its env, pass_env, layer and trust_remote_code are ignored",
            found=found,
            fix="--trust-run uses them: code of that user then runs as you",
        )
        print(f"dray: {ignored.level}: {ignored}", file=sys.stderr)
        recipe = recipe.with_values("model", trust_remote_code=False)
        plan = plan.model_copy(update={"recipe": recipe.model_copy(update={"env": {}, "pass_env": (), "layer": None})})
    return plan, paths


def ended(run: Path, *, trust: bool = False) -> tuple[Plan, Path]:
    """The plan of an ended run, and the folder of its final model."""
    plan, paths = trained(run, trust=trust)
    if not paths.final_model.is_dir():
        raise ConfigError(
            "the run has no final model",
            where=paths.final_model,
            found="a run that has not ended",
            fix="let it end: with checkpoint.folder set, the same command resumes from its checkpoints",
        )
    links = [path for path in paths.final_model.rglob("*") if path.is_symlink()]
    if links and not trust and foreign(paths):
        raise ConfigError(
            "links in another user's model may lead to your own files",
            where=links[0],
            found=f"a link to {links[0].readlink()}",
            fix="copy the run with cp -rL, or use --trust-run",
        )
    return plan, paths.final_model


def hub_variables() -> tuple[str, ...]:
    """The names of the variables for reaching the hub that are set; their values are passed by name."""
    return tuple(name for name in ("HF_TOKEN", *_NETWORK) if name in os.environ)


def once(
    recipe: Recipe,
    job: image_tasks.Job,
    *,
    engine: Engine,
    folder: Path,
    env: Mapping[str, str] | None = None,
    sections: Sequence[str] = (),
    by_gpu: bool = False,
) -> int:
    """Run one job of contract/trainer/image_tasks.py and show its output as it comes; its exit code.

    The job is a run of one rank in `folder` that leaves no run folder. Python imports nothing from `folder`, which may
    be another user's model. The container sees `folder` and the files that the recipe's `sections` name. With `by_gpu`
    it also sees a GPU, if this machine has the kind that the recipe's image is for.
    """
    environment = {**recipe.env, **(env or {}), "PYTHONSAFEPATH": "1"}
    gpus = int(by_gpu and node.has_gpu(ACCELERATORS[recipe.image]))
    facts = local.facts(recipe, engine=engine, nodes=1, gpus_per_node=gpus, site="")
    visible = recipe.with_values("data", streaming=False)  # as in training
    with TemporaryDirectory(prefix="dray-") as runs:
        run = new_id(recipe.name)
        file = Path(runs, run, "job.json")
        program = Recipe(
            name=recipe.name,
            image=recipe.image if gpus else "cpu",
            launcher="python",
            ranks_per_node=1,
            env=environment,
            pass_env=tuple(name for name in recipe.pass_env if name not in environment),
            preflight=Preflight(when="never"),
            command=Command(
                argv=(engines.get(engine).python(facts.image), "-m", "dray.train.outputs", str(file)),
                folder=str(folder),
            ),
        ).model_copy(update={name: getattr(visible, name) for name in sections})
        plan, paths = prepare.write(program, facts, runs=Path(runs), run=run)
        file.write_text(json.dumps(image_tasks.to_json(job)), encoding="utf-8")
        output = Output(paths.rank_log(0))
        code = local.run(plan, paths, watch=output.look)
        output.look()
        result = finish(paths, code=code)
        if result.cause and output.empty:  # the job never started
            print("\n".join(result.cause.last_lines), file=sys.stderr)
        return result.exit_code
