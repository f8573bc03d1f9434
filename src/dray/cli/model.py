"""`dray model`: evaluate, export or push a run's model, generate text with it, or import another program's."""

from __future__ import annotations

import os
import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

import typer

from dray.cli.args import Engine, NamedRun, Overrides, Runs, found
from dray.config.recipe import Command, Recipe
from dray.config.training import Evaluation
from dray.contract.findings import ConfigError
from dray.contract.trainer import image_tasks
from dray.runs import local, store
from dray.runs.prepare import over, read_recipe
from dray.runs.store import dig, find, newest_attempt, read_json

model_verbs = typer.Typer()
TrustRun = Annotated[
    bool,
    typer.Option(
        "--trust-run",
        help="For another user's run: use its env, pass_env, layer, trust_remote_code and functions on rows too.",
    ),
]
DeviceMap = Annotated[
    Literal["auto"] | None,
    typer.Option(help="For a model larger than one device: auto places its layers on all GPUs, then in host memory."),
]
_SETTINGS_OF_DATASETS = ("data", "evaluate", "train", "env", "pass_env", "image")
_SETTINGS_OF_TASKS = ("env", "pass_env", "image", "layer")


@model_verbs.command("eval")
def evaluate(
    run: NamedRun,
    overrides: Overrides = None,
    tasks: str = "",
    device_map: DeviceMap = None,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
    runs: Runs = None,
) -> int:
    """Evaluate a run's model on the recipe's datasets, on others, or on tasks of lm-eval, here on a GPU or CPUs.

    --tasks TASKS: Tasks of lm-eval, separated by commas, instead of datasets. Options of lm-eval follow after --.

    dray model eval RUN evaluate.mine.dataset=some.txt
    dray model eval RUN --tasks hellaswag,arc_easy -- --num_fewshot 5
    """
    folder = find(run, runs)
    plan, model = local.ended_run(folder, trust=trust_run)
    settings = [*takewhile(lambda word: not word.startswith("-"), overrides or [])]
    options = (overrides or [])[len(settings) :]
    effective = _SETTINGS_OF_TASKS if tasks else _SETTINGS_OF_DATASETS
    for setting in settings:
        if re.split("[.=]", setting)[0] not in effective:
            raise ConfigError(
                "this setting has no effect on an evaluation",
                wanted=f"settings of {', '.join(effective)}",
                found=setting,
                fix="leave it out",
            )
    if options and not tasks:
        raise ConfigError(
            "options after -- are for lm-eval", found=shlex.join(options), fix="add --tasks TASKS, or leave them out"
        )
    recipe = over(plan.recipe, settings)
    if tasks:
        per_device = (plan.batch and plan.batch.per_device) or 1
        trusted = recipe.model.trust_remote_code
        asked = image_tasks.LmEval(str(model), tasks, options, recipe.image, per_device, trusted, bool(device_map))
        return _lm_eval(recipe, asked, engine)
    if not trust_run and store.foreign_path(newest_attempt(folder)):
        theirs = recipe.maps().items() & plan.recipe.maps().items()
        store.require_no_functions(theirs, str(folder))
    changed = plan.model_copy(update={"recipe": recipe}).model_dump(mode="json")
    job = image_tasks.Evaluate(str(model), changed, bool(device_map))
    return local.run_in_image(recipe, job, engine=engine, folder=model, sections=("data", "evaluate"), by_gpu=True)


def _lm_eval(recipe: Recipe, job: image_tasks.LmEval, engine: str) -> int:
    """Run lm-eval in the run's folder lm-eval, where it leaves its results, or in ./lm-eval; its exit code."""
    if recipe.train and recipe.train.objective == "masked":
        raise ConfigError(
            "lm-eval's tasks are for models that predict the next token",
            found="train.objective = masked",
            fix="leave out --tasks to evaluate on the recipe's datasets",
        )
    model = Path(job.model)
    run = model.parents[1]
    folder = (run if os.access(run, os.W_OK) else Path.cwd()) / "lm-eval"  # the run may be another user's
    folder.mkdir(exist_ok=True)
    named = [Path(option.partition("=")[2] or option) for option in job.options]
    recipe = _with_files(recipe, model, *(path for path in named if path.is_absolute() and path.exists()))
    return local.run_in_image(recipe, job, engine=engine, folder=folder, sections=("evaluate", "layer"), by_gpu=True)


def _with_files(recipe: Recipe, *files: Path) -> Recipe:
    """The recipe with these files as its datasets: a container gets datasets as binds."""
    datasets = {f"file-{number}": Evaluation(dataset=str(file)) for number, file in enumerate(files)}
    return recipe.model_copy(update={"evaluate": datasets})


@model_verbs.command()
def generate(
    run: NamedRun,
    prompt: str = "",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Number of tokens to generate. Default: 64, or as many as fit.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for a temperature above 0.")] = 0,
    device_map: DeviceMap = None,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
    runs: Runs = None,
) -> int:
    """Continue a prompt with a run's model, on this machine's GPU or CPUs, and print both.

    PROMPT: The text to continue; an sft model answers it.

    dray model generate RUN 'two: the' --tokens 40
    """
    plan, model = local.ended_run(find(run, runs), trust=trust_run)
    objective = plan.recipe.train.objective if plan.recipe.train else "causal"
    job = image_tasks.Generate(
        str(model), objective, prompt, tokens or 0, temperature, seed,
        trust_remote_code=plan.recipe.model.trust_remote_code, device_map=bool(device_map),
    )  # fmt: skip
    return local.run_in_image(plan.recipe, job, engine=engine, folder=model, by_gpu=True)


@model_verbs.command()
def export(
    run: NamedRun,
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint's step. Default: the newest.")] = None,
    to: Path | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
    format: Literal["transformers", "dcp"] = "transformers",
    engine: Engine = "bare",
    trust_run: TrustRun = False,
    runs: Runs = None,
) -> int:
    """Export a checkpoint as a folder that from_pretrained loads, by default as RUN/exports/step-N. Needs no GPU.

    --to FOLDER: Folder to write the model into.
    --dtype: Type of the weights.
    --format: dcp writes weights and optimizer state in the types of the checkpoint, for torch's DCP.

    dray model export RUN --to weights --dtype bf16
    """
    plan, paths = local.trained_run(find(run, runs), trust=trust_run)
    folder = Path(plan.recipe.checkpoint.folder or paths.checkpoints)
    chosen = _step(folder, plan.run, step)
    target = _new(to or paths.run / f"exports/step-{chosen}")
    checkpoint = str(folder / f"step-{chosen}")
    job = image_tasks.Export(checkpoint, str(target), dtype, plan.model_dump(mode="json"), format)
    # The container sees the checkpoints by the recipe's folder of them.
    recipe = plan.recipe.with_values("checkpoint", folder=str(folder), mirror="")
    return local.run_in_image(recipe, job, engine=engine, folder=target.parent, sections=("model", "checkpoint"))


@model_verbs.command()
def push(
    run: NamedRun,
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; created if it is missing.")],
    public: bool = False,
    adapter: bool = False,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
    runs: Runs = None,
) -> int:
    """Push a run's model and its model card to the hub, as the user of HF_TOKEN.

    --public: Create a public repository. Default: private.
    --adapter: Push only the LoRA adapter, without the model.

    dray model push RUN me/my-model
    """
    plan, model = local.ended_run(find(run, runs), trust=trust_run)
    if not re.fullmatch("[^/]+/[^/]+", name):
        raise ConfigError("a model's name on the hub has two parts", wanted="OWNER/NAME", found=name)
    if adapter:
        model = model.with_name("adapter")
        if not model.is_dir():
            raise ConfigError("the run trained no LoRA", where=model, fix="leave out --adapter to push the model")
    recipe = plan.recipe.model_copy(update={"pass_env": local.hub_variables()})
    job = image_tasks.Push(str(model), name, private=not public)
    return local.run_in_image(recipe, job, engine=engine, folder=model, env={"HF_HUB_OFFLINE": "0"})


@model_verbs.command("import")
def import_(
    source: Path,
    recipe: Path | None = None,
    overrides: Overrides = None,
    to: Path | None = None,
    config: Path | None = None,
    prefix: str | None = None,
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
    trust: bool = False,
    engine: Engine = "bare",
) -> int:
    """Import a checkpoint of Trainer, DeepSpeed or torch as a model (--to), as a checkpoint to resume from, or both.

    SOURCE: A Trainer's checkpoint-N, a DeepSpeed or DCP folder, or a .safetensors, .bin or .pt file.
    RECIPE: Recipe to resume with: write a checkpoint into its checkpoint.folder.
    --to FOLDER: Folder to write the model into.
    --config FOLDER: Folder of config.json and tokenizer. Default: the checkpoint's.
    --prefix PREFIX: Prefix of the model's tensor names in the checkpoint, with its dot, such as `app.model.`
    --dtype: Type of the written weights; auto keeps their type.
    --trust: Load its pickles, which can run code: only if you trust who wrote them.

    dray model import output/checkpoint-500 --to my-model
    """
    source, config = source.absolute(), config and config.absolute()
    if not source.exists():
        raise ConfigError("the checkpoint does not exist", where=source, fix="give the path of its folder or file")
    if to is None and recipe is None:
        raise ConfigError(
            "there is nothing to write: neither --to nor a recipe was given",
            fix=f"dray model import {shlex.quote(str(source))} --to FOLDER",
        )
    target = _new(to) if to else None
    settings = _to_resume(found(recipe), overrides or []) if recipe else None
    job = image_tasks.Importing(
        str(source),
        str(target or ""),
        recipe=settings.model_dump(mode="json") if settings else {},
        config=str(config) if config else "",
        prefix=prefix,
        dtype=dtype,
        trust=trust,
    )
    seen = settings or Recipe(name="import", image="cpu", command=Command(argv=("true",)))
    seen = _with_files(seen, source.parent, *filter(None, [config]))
    folder = target.parent if target else Path(seen.checkpoint.folder)
    return local.run_in_image(
        seen, job, engine=engine, folder=folder, sections=("data", "model", "checkpoint", "evaluate")
    )


def _new(target: Path) -> Path:
    """The absolute path of a folder that does not exist, in one that does."""
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise ConfigError("the target exists already", where=target, fix="--to ANOTHER_FOLDER")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _step(folder: Path, run: str, step: int | None) -> int:
    """The step of this run's checkpoint, by default the newest; other runs may keep theirs in the same folder."""
    own = []
    for path in folder.glob("step-*"):
        # Without a manifest the export says what is wrong.
        if path.name[5:].isdigit() and dig(read_json(path / "manifest.json", []), "run") in (None, run):
            own.append(int(path.name[5:]))
    if own and step in (None, *own):
        return max(own) if step is None else step
    raise ConfigError(
        "this run has no such checkpoint",
        where=folder,
        found=f"steps {', '.join(map(str, sorted(own)))}" if own else "none",
        fix="--step N with a step of this run; checkpoint.every=N in the recipe keeps checkpoints",
    )


def _to_resume(path: Path, overrides: list[str]) -> Recipe:
    """The recipe, if a run of it can resume from another program's checkpoint."""
    recipe = read_recipe(path, overrides)
    folder = Path(recipe.checkpoint.folder)
    refused = {
        "a recipe with [train]: dray recipe new mine.toml": not recipe.train,
        "checkpoint.folder=FOLDER": not recipe.checkpoint.folder,
        "lora.enabled=false": recipe.lora and recipe.lora.enabled,
        "analog.enabled=false": recipe.analog and recipe.analog.enabled,
        "data.streaming=false": recipe.data.streaming,  # of a dataset on the disk a step gives the position
        "checkpoint.folder=ANOTHER, a folder without checkpoints": any(
            path.name[5:].isdigit() for path in folder.glob("step-*")
        ),
    }
    for fix, is_refused in refused.items():
        if is_refused:
            raise ConfigError("this recipe cannot resume from another program's checkpoint", where=path, fix=fix)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return recipe
