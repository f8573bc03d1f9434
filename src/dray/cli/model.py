"""`dray model`: evaluate, export or push a run's model. Short forms: `dray eval RUN` is `dray model eval RUN`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dray.cli import candidates
from dray.cli.chosen import Engine
from dray.cli.options import Runs
from dray.config.recipe import Recipe
from dray.contract import image_tasks
from dray.contract.findings import ConfigError
from dray.runs import desk, hub, trust, write
from dray.runs.store import find, newest_attempt

app = typer.Typer(no_args_is_help=True, help="Evaluate, export or push the model of a run, or generate text with it.")
TrustRun = Annotated[
    bool,
    typer.Option(
        "--trust-run",
        help="For another user's run: use its env, pass_env, trust_remote_code and functions on rows too.",
    ),
]
DeviceMap = Annotated[
    Literal["auto"] | None,
    typer.Option(help="For a model larger than one device: auto places its layers on all GPUs, then in host memory."),
]
MaxMemory = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEVICE=SIZE", help="With --device-map: limit of a device, such as 0=20GB or cpu=60GB; may be repeated."
    ),
]
OffloadFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="With --device-map: folder for layers that fit into no memory; slow."),
]
_SIZE = re.compile(r"(cpu|\d{1,3})=(\d{1,6}(?:\.\d{1,3})?[KMG]i?B)")
_EVALUATED = ("data", "evaluate", "train", "env", "pass_env", "image")
_HELP = "The run: its folder, its name or the beginning of it, or a job number."
Run = Annotated[str, typer.Argument(metavar="RUN", help=_HELP, autocompletion=candidates.runs)]


def _folder(run: str, runs: Path | None) -> Path:
    """Refuse an empty name: a script's variable may be empty, and the newest run would be pushed."""
    if not run:
        raise ConfigError("no run is named", wanted="a run's folder, name or job number", found="an empty argument")
    return find(run, runs)


@app.command("eval")
def evaluate(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings that override the run's, such as evaluate.mine.dataset=some.txt."
        ),
    ] = None,
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
    runs: Runs = None,
) -> None:
    """Evaluate a run's model on the recipe's datasets, or on others, on this machine's GPU or CPUs.

    dray eval runs/20261120-124439-smoke-cpu-cea81f
    """
    folder = _folder(run, runs)
    plan, final = desk.ended(folder, trust=trust_run)
    for override in overrides or []:
        if override.partition("=")[0].partition(".")[0].strip() not in _EVALUATED:
            raise ConfigError(
                "this setting has no effect on an evaluation",
                wanted=f"settings of {', '.join(_EVALUATED)}",
                found=override,
                fix="leave it out",
            )
    placing = _placing(device_map, max_memory or [], offload_folder)
    recipe = write.over(plan.recipe, overrides or [])
    if not trust_run and trust.foreign(newest_attempt(folder)):
        theirs = recipe.maps().items() & plan.recipe.maps().items()
        trust.require(trust.functions(theirs), str(folder))
    job = image_tasks.Evaluate(str(final), plan.model_copy(update={"recipe": recipe}).model_dump(mode="json"), placing)
    seen = ("data", "evaluate", "checkpoint")
    recipe = _writing(recipe, offload_folder)
    raise typer.Exit(desk.once(recipe, job, engine=engine, folder=final, sections=seen, by_gpu=True))


def _placing(device_map: str | None, max_memory: list[str], folder: Path | None) -> dict[str, Any] | None:
    """How the job places a model on several devices; None if it uses one."""
    if device_map is None and (max_memory or folder):
        raise ConfigError("--max-memory and --offload-folder need --device-map", fix="add --device-map auto")
    sizes = {}
    for one in max_memory:
        match = _SIZE.fullmatch(one)
        if not match or match[1] in sizes:
            raise ConfigError(
                "--max-memory has a wrong value", wanted="DEVICE=SIZE: a GPU's number or cpu, each only once",
                found=one, fix="--max-memory 0=20GB --max-memory cpu=60GB",
            )  # fmt: skip
        sizes[match[1]] = match[2]
    return {"max_memory": sizes, "offload_folder": str(folder.absolute()) if folder else ""} if device_map else None


def _writing(recipe: Recipe, folder: Path | None) -> Recipe:
    """The recipe with `folder` as its checkpoint folder: the only one to which a container may write."""
    held = recipe.checkpoint.model_copy(update={"folder": str(folder.absolute()) if folder else "", "mirror": ""})
    return recipe.model_copy(update={"checkpoint": held})


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(help="The text to continue; an sft model answers it.")] = "",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Number of tokens to generate. Default: 64, or as many as fit.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for a temperature above 0.")] = 0,
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
    runs: Runs = None,
) -> None:
    """Continue a prompt with a run's model, on this machine's GPU or CPUs, and print both.

    dray generate runs/20261120-124439-mine-cea81f 'two: the' --tokens 40
    """
    plan, final = desk.ended(_folder(run, runs), trust=trust_run)
    recipe = plan.recipe
    job = image_tasks.Generate(
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
    step: Annotated[int | None, typer.Option(min=1, help="The checkpoint's step. Default: the newest.")] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write. Default: RUN/exports/step-N.")
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Type of the weights.")] = "fp32",
    shard_gb: Annotated[
        float, typer.Option(min=1e-6, help="Largest size of one weight file, in GB; the memory needed grows with it.")
    ] = 4.0,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
    runs: Runs = None,
) -> None:
    """Export a checkpoint as a folder that from_pretrained loads: safetensors, config.json, tokenizer. Needs no GPU.

    dray export runs/20261120-124439-smoke-cpu-cea81f --to weights --dtype bf16
    """
    plan, paths = desk.trained(_folder(run, runs), trust=trust_run)
    folder = Path(plan.recipe.checkpoint.folder or paths.checkpoints)
    steps = _steps(folder, plan.run, step)
    chosen = step or steps[-1]
    target = (to or paths.run / "exports" / f"step-{chosen}").absolute()
    if target.exists():
        raise ConfigError("the target exists already", where=target, fix="--to ANOTHER_FOLDER")
    target.parent.mkdir(parents=True, exist_ok=True)
    job = image_tasks.Export(str(folder / f"step-{chosen}"), str(target), dtype, shard_gb, plan.model_dump(mode="json"))
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
        fix = f"{folder / 'final'} is an export of the last model; checkpoint.every=N keeps checkpoints before the end"
    if runs:
        fix = "--step N, with a step of this run" if own else "dray export RUN, with the run that wrote it"
    raise ConfigError(
        f"this run has no checkpoint of step {step}" if step else "this run has no checkpoint",
        where=folder, found="\n".join(found) or "none", fix=fix,
    )  # fmt: skip


def _run_of(checkpoint: Path) -> str:
    """The run that wrote the checkpoint; empty if its manifest cannot be read, which the export reports."""
    try:
        return str(json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


@app.command()
def push(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; created if it is missing.")],
    public: Annotated[bool, typer.Option("--public", help="Create a public repository. Default: private.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Push only the LoRA adapter, without the model.")] = False,
    engine: Engine = "bare",
    trust_run: TrustRun = False,
    runs: Runs = None,
) -> None:
    """Push a run's model and its model card to the hub, as the user of HF_TOKEN.

    dray push runs/20261120-124439-smoke-cpu-cea81f me/my-model
    """
    plan, folder = desk.ended(_folder(run, runs), trust=trust_run)
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError("a model's name on the hub has two parts", wanted="OWNER/NAME", found=name)
    if adapter:
        folder = folder.with_name("adapter")
        if not folder.is_dir():
            raise ConfigError("the run trained no LoRA", where=folder, fix="leave out --adapter to push the model")
    recipe = plan.recipe.model_copy(update={"pass_env": hub.passed()})
    job = image_tasks.Push(str(folder), name, private=not public)
    raise typer.Exit(desk.once(recipe, job, engine=engine, folder=folder, env={"HF_HUB_OFFLINE": "0"}))
