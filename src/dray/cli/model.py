"""`dray model`: what is made of a run's model. Each verb has a short form: `dray eval RUN` is `dray model eval RUN`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dray.cli import candidates
from dray.cli.chosen import Engine
from dray.config.recipe import Recipe
from dray.contract import jobs
from dray.contract.findings import ConfigError
from dray.runs import desk, hub, trust, write
from dray.runs.named import find
from dray.runs.paths import newest_attempt

app = typer.Typer(no_args_is_help=True, help="Evaluate, export and push the model of a run, and let it generate text.")
TrustRun = Annotated[
    bool,
    typer.Option(
        "--trust-run",
        help="Of another user's run, take its env, pass_env, trust_remote_code and functions on rows, too.",
    ),
]
DeviceMap = Annotated[
    Literal["auto"] | None,
    typer.Option(help="For a model larger than one device: auto places its layers on all GPUs, then in host memory."),
]
MaxMemory = Annotated[
    list[str] | None,
    typer.Option(metavar="DEVICE=SIZE", help="With --device-map: 0=20GB or cpu=60GB; may be repeated."),
]
OffloadFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="With --device-map: where layers go that no memory has room for; slow."),
]
_SIZE = re.compile(r"(cpu|\d{1,3})=(\d{1,6}(?:\.\d{1,3})?[KMG]i?B)")
_EVALUATED = ("data", "evaluate", "train", "env", "pass_env", "image")
# Of the runs in DRAY_RUNS or ./runs; its checkpoints/final is the model.
_HELP = "A run's folder, name or its beginning, or a job's number."
Run = Annotated[str, typer.Argument(metavar="RUN", help=_HELP, autocompletion=candidates.runs)]


def _folder(run: str) -> Path:
    """The newest is not meant where a script's variable is empty: its model would be pushed."""
    if not run:
        raise ConfigError("no run is named", wanted="a run's folder, name, or job's number", found="an empty word")
    return find(run)


@app.command("eval")
def evaluate(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win, such as evaluate.mine.dataset=some.txt."),
    ] = None,
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
) -> None:
    """Evaluate the model of a run on the recipe's datasets, or on others, by this machine's GPU or its CPUs.

    dray eval runs/20261120-124439-smoke-cpu-cea81f
    """
    folder = _folder(run)
    plan, final = desk.ended(folder, trust=trust_run)
    for override in overrides or []:
        if override.partition("=")[0].partition(".")[0].strip() not in _EVALUATED:
            raise ConfigError(
                "this setting has no effect on an evaluation of the run's model",
                wanted=f"settings of {', '.join(_EVALUATED)}",
                found=override,
                fix="leave it out",
            )
    placing = _placing(device_map, max_memory or [], offload_folder)
    recipe = write.over(plan.recipe, overrides or [])
    if not trust_run and trust.foreign(newest_attempt(folder)):
        theirs = recipe.maps().items() & plan.recipe.maps().items()
        trust.require(trust.functions(theirs), str(folder), does="an evaluation")
    job = jobs.Evaluate(str(final), plan.model_copy(update={"recipe": recipe}).model_dump(mode="json"), placing)
    seen = ("data", "evaluate", "checkpoint")
    recipe = _writing(recipe, offload_folder)
    raise typer.Exit(desk.once(recipe, job, engine=engine, folder=final, sections=seen, by_gpu=True))


def _placing(device_map: str | None, max_memory: list[str], folder: Path | None) -> dict[str, Any] | None:
    """What the job is told of a model on several devices."""
    if device_map is None and (max_memory or folder):
        raise ConfigError(
            "--max-memory and --offload-folder are for a model on several devices",
            wanted="--device-map auto beside them",
            fix="--device-map auto",
        )
    sizes = {}
    for one in max_memory:
        match = _SIZE.fullmatch(one)
        if not match or match[1] in sizes:
            raise ConfigError(
                "--max-memory has a wrong value", wanted="a GPU's number or cpu, once each, and a size",
                found=one, fix="--max-memory 0=20GB --max-memory cpu=60GB",
            )  # fmt: skip
        sizes[match[1]] = match[2]
    return {"max_memory": sizes, "offload_folder": str(folder.absolute()) if folder else ""} if device_map else None


def _writing(recipe: Recipe, folder: Path | None) -> Recipe:
    """A container may write there, as a run does in its folder of checkpoints; nowhere else."""
    held = recipe.checkpoint.model_copy(update={"folder": str(folder.absolute()) if folder else "", "mirror": ""})
    return recipe.model_copy(update={"checkpoint": held})


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(help="The text to continue; an sft model answers it.")] = "",
    tokens: Annotated[int | None, typer.Option(min=1, help="How many to generate; else 64, or what fits.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="For a temperature above 0.")] = 0,
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
) -> None:
    """Print a prompt and what the model of a run makes of it, by this machine's GPU or its CPUs.

    dray generate runs/20261120-124439-mine-cea81f 'two: the' --tokens 40
    """
    plan, final = desk.ended(_folder(run), trust=trust_run)
    recipe = plan.recipe
    job = jobs.Generate(
        str(final),
        objective=recipe.train.objective if recipe.train else "causal",
        prompt=prompt,
        tokens=tokens or 0,
        temperature=temperature,
        seed=seed,
        trust_remote_code=recipe.model.trust_remote_code,
        placing=_placing(device_map, max_memory or [], offload_folder),
    )
    recipe = _writing(recipe, offload_folder)
    raise typer.Exit(desk.once(recipe, job, engine=engine, folder=final, sections=("checkpoint",), by_gpu=True))


@app.command()
def export(
    run: Run,
    step: Annotated[int | None, typer.Option(min=1, help="The checkpoint's step; else the newest.")] = None,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Target; else RUN/exports/step-N.")] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Type of the weights.")] = "fp32",
    shard_gb: Annotated[float, typer.Option(min=1e-6, help="Largest file, and so the memory it takes.")] = 4.0,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
) -> None:
    """Write a checkpoint's weights as safetensors with configuration and tokenizer, on one CPU.

    dray export runs/20261120-124439-smoke-cpu-cea81f --to weights --dtype bf16
    """
    plan, paths = desk.trained(_folder(run), trust=trust_run)
    folder = Path(plan.recipe.checkpoint.folder or paths.checkpoints)
    steps = _steps(folder, plan.run, step)
    chosen = step or steps[-1]
    target = (to or paths.run / "exports" / f"step-{chosen}").absolute()
    if target.exists():
        raise ConfigError("the target exists already", where=target, fix="name another folder: --to")
    target.parent.mkdir(parents=True, exist_ok=True)
    job = jobs.Export(str(folder / f"step-{chosen}"), str(target), dtype, shard_gb, plan.model_dump(mode="json"))
    held = plan.recipe.checkpoint.model_copy(update={"folder": str(folder), "mirror": ""})
    recipe = plan.recipe.model_copy(update={"checkpoint": held})
    raise typer.Exit(desk.once(recipe, job, engine=engine, folder=target.parent, sections=("model", "checkpoint")))


def _steps(folder: Path, run: str, step: int | None) -> list[int]:
    """The steps of this run's checkpoints, `step` among them; other runs may keep theirs in the same folder."""
    runs: dict[str, list[int]] = {}
    for number, path in sorted((int(path.name[5:]), path) for path in folder.glob("step-*") if path.name[5:].isdigit()):
        runs.setdefault(_run_of(path) or run, []).append(number)
    own = runs.get(run, [])
    if own and (step is None or step in own):
        return own
    found = (f"steps {', '.join(map(str, steps))} of the run {name}" for name, steps in runs.items())
    fix = "set checkpoint.every in the recipe"
    if step is None and (folder / "final").is_dir():
        fix = (
            f"{folder / 'final'} is the last model, in the form of an export; checkpoint.every=N keeps steps before it"
        )
    if runs:
        fix = "name a step of this run: --step" if own else "name the run that wrote it: dray export RUN"
    raise ConfigError(
        f"there is no checkpoint of step {step} of this run" if step else "there is no checkpoint of this run",
        where=folder, found="\n".join(found) or "none", fix=fix,
    )  # fmt: skip


def _run_of(checkpoint: Path) -> str:
    """Which run wrote it; empty where its manifest cannot be read, which the export says better."""
    try:
        return str(json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


@app.command()
def push(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub; made if needed.")],
    public: Annotated[bool, typer.Option("--public", help="Readable by all; else private.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone, without the model.")] = False,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
) -> None:
    """Push the model of a run to the hub, with its card, as the owner of HF_TOKEN.

    dray push runs/20261120-124439-smoke-cpu-cea81f me/my-model
    """
    plan, folder = desk.ended(_folder(run), trust=trust_run)
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError("a model's name on the hub has two parts", wanted="OWNER/NAME", found=name)
    if adapter:
        folder = folder.with_name("adapter")
        if not folder.is_dir():
            raise ConfigError("the run trained no LoRA", where=folder, fix="leave out --adapter: the model is whole")
    recipe = plan.recipe.model_copy(update={"pass_env": hub.passed()})
    job = jobs.Push(str(folder), name, private=not public)
    raise typer.Exit(desk.once(recipe, job, engine=engine, folder=folder, env={"HF_HUB_OFFLINE": "0"}))
