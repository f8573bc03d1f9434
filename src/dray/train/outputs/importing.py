"""Another program's checkpoint as a model that `from_pretrained` loads, or as one that a recipe's run resumes from."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from dray.contract import files
from dray.contract.findings import ConfigError, counted
from dray.contract.image_tasks import Importing
from dray.train import errors, importing
from dray.train.checkpoint import manifest, saved
from dray.train.checkpoint.shards import Shards, whole
from dray.train.config import Config, of_recipe
from dray.train.data import datasets, tokenizer
from dray.train.importing.source import Adam, Source, Tensors, file, matched, names, reading
from dray.train.model import build
from dray.train.parallel.base import buffers
from dray.train.parallel.optimizer import KINDS

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja",
)  # fmt: skip
_LARGEST = 256 << 20  # bytes of a tokenizer's file


def run(job: Importing) -> None:
    """Read it once, and write what was asked for."""
    path = Path(job.source)
    with reading(path):
        found = importing.find(path, trust=job.trust)
    print(f"{path}: {found.kind}, {counted(len(found.weights), 'tensor')}", flush=True)
    if job.recipe and found.adam is None:
        raise ConfigError(
            "a run cannot resume from this checkpoint",
            where=job.source,
            wanted="AdamW's averages (exp_avg, exp_avg_sq) beside the weights",
            found=found.without,
            fix="start a new training from its weights: "
            f"dray model import {shlex.quote(job.source)} --to FOLDER, then model.name=FOLDER in the recipe",
        )
    if job.target:
        _model(job, found)
    if job.recipe and found.adam:
        _checkpoint(job, found, found.adam)


def _model(job: Importing, found: Source) -> None:
    """By transformers itself, which knows what its models' tensors were once called. The folder is atomic."""
    target, folder = Path(job.target), Path(job.config or found.folder)
    settings, kind = _settings(folder, found)
    with torch.device("meta"):
        shell: PreTrainedModel = kind.from_config(settings, trust_remote_code=False)
    shell.tie_weights()
    size, stored = (sum(one.numel() for one in some) for some in (shell.parameters(), found.weights.values()))
    if size > stored:
        _refuse_other(folder, f"{size:,} parameters", f"{stored:,} numbers in {job.source}")
    named = matched(found.weights, shell.state_dict(), shell.base_model_prefix, job.prefix)
    for name, own in shell.state_dict().items():
        if name in named and named[name].shape != own.shape:
            _refuse_other(folder, f"{name} with the shape {list(own.shape)}", f"the shape {list(named[name].shape)}")
    dtype = _TYPES.get(job.dtype) or _widest(named)
    try:
        network, loading = type(shell).from_pretrained(
            None, config=settings, state_dict=dict(named), dtype=dtype, output_loading_info=True
        )
    except (RuntimeError, ValueError) as error:
        _refuse_other(folder, "tensors of the configuration's shapes", errors.message(error, 400))
    if lacking := sorted(loading["missing_keys"]):
        _refuse_other(folder, f"{lacking[0]}, and {len(lacking) - 1} more", f"tensors such as {next(iter(named), '')}")
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o755, parents=True)
    network.config.__dict__.pop("auto_map", None)  # code of its own, which is not brought
    network.save_pretrained(part, max_shard_size="4GB")
    present = names(folder)
    brought = [name for name in (*_TOKENIZER, "generation_config.json") if name in present]
    for name in brought:
        (part / name).write_bytes(files.read(file(folder, name), limit=_LARGEST))
    manifest.seal_model(part)
    part.rename(target)
    left = f"; not used: {', '.join(sorted(loading['unexpected_keys'])[:3])}" if loading["unexpected_keys"] else ""
    print(f"{target}: {type(network).__name__}, {size:,} parameters of {dtype}{left}", flush=True)
    if "tokenizer.json" not in brought:
        print(f"{folder} has no tokenizer.json: set model.tokenizer, or import again with --config FOLDER")
    print(f"to train it further: model.name={target.absolute()}", flush=True)


def _settings(folder: Path, found: Source) -> tuple[Any, Any]:
    """The configuration, and the kind of model that it is of."""
    if "config.json" not in names(folder):
        raise ConfigError(
            "the checkpoint does not say which model it is of",
            where=folder,
            wanted="a config.json beside the tensors",
            found=f"{found.kind} without a config.json",
            fix="--config FOLDER: a folder that save_pretrained wrote for the model that was trained",
        )
    path = file(folder, "config.json")
    with reading(path):  # transformers checks little of what a file says
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architectures = settings.architectures or []
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if not causal and not any(name.endswith("ForMaskedLM") for name in architectures):
        raise ConfigError(
            "dray does not train this kind of model", where=path, wanted="a causal or masked language model",
            found=ascii(architectures)[:200], fix="--config FOLDER",
        )  # fmt: skip
    layers = getattr(settings.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(found.weights):
        _refuse_other(folder, f"{layers:,} layers", f"{len(found.weights):,} tensors")
    return settings, AutoModelForCausalLM if causal else AutoModelForMaskedLM


def _widest(tensors: Tensors) -> torch.dtype:
    found = {one.dtype for one in tensors.values() if one.is_floating_point()} or {torch.float32}
    return max(found, key=lambda one: one.itemsize) if len(found) > 1 else found.pop()


def _refuse_other(folder: Path, wanted: str, found: str) -> NoReturn:
    raise ConfigError(
        "the checkpoint does not fit its configuration",
        where=folder / "config.json",
        wanted=wanted,
        found=found,
        fix="--config FOLDER, with the config.json of the model that was trained",
    )


def _checkpoint(job: Importing, found: Source, read_adam: Callable[[torch.nn.Module], Adam]) -> None:
    """Of one rank, as any number of ranks of any strategy reads it. It is atomic."""
    config = of_recipe(job.recipe)
    tokens = tokenizer.load(config)
    shell = build.shell(config, tokens)
    shell.tie_weights()
    with reading(Path(job.source)):
        adam = read_adam(shell)
    weights = matched(found.weights, shell.state_dict(), shell.base_model_prefix, job.prefix)
    state = {"weights": weights, **adam.moments}
    kept = {kind: _those(dict(shell.named_parameters()), state[kind], kind, job.source) for kind in KINDS}
    kept["others"] = _those(buffers(shell), weights, "buffers", job.source)
    step = adam.updates if found.step is None else found.step
    data = datasets.load(config, tokens)
    steps = data.steps(config)
    if step > steps or step < 1:
        raise ConfigError(
            "the checkpoint's step is not a step of the recipe",
            where=job.source, wanted=f"a step from 1 to {steps}, the recipe's train.steps", found=f"step {step}",
            fix=f"train.steps={max(step, 1)} or more" if step else "import its weights: --to FOLDER",
        )  # fmt: skip
    folder = Path(config.checkpoints) / f"step-{step}"
    part = folder.with_name(f"{folder.name}.part-import")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o755, parents=True)
    about = {"step": step, "updates": adam.updates, "run": "", "image_sha256": "", "dray": f"import of {found.kind}"}
    about |= {"world_size": 1, "order": saved.order(config, data.training.identity)}
    saved.write(part, _batches(kept), about)
    part.rename(folder)
    manifest.sync(folder.parent)
    saved.opened(folder)
    _tell(config, folder, step, steps, adam)


def _batches(kept: dict[str, Tensors], most: int = 1 << 28) -> Iterator[Shards]:
    """So many numbers at a time."""
    batch: Shards = {}
    for kind, tensors in kept.items():
        for name, tensor in tensors.items():
            batch |= whole(kind, {name: tensor})
            if sum(shard.values.numel() for shard in batch.values()) >= most:
                yield batch
                batch = {}
    if batch:
        yield batch


def _those(wanted: dict[str, torch.Tensor], given: Tensors, kind: str, source: str) -> Tensors:
    """The model's own of them, each of its shape."""
    for name, tensor in wanted.items():
        shape = tuple(given[name].shape) if name in given else None
        if shape != tuple(tensor.shape):
            raise ConfigError(
                "the checkpoint does not fit the recipe's model",
                where=source,
                wanted=f"{name} with the shape {list(tensor.shape)}",
                found=f"the shape {list(shape)}" if shape else f"{kind} such as {next(iter(given), 'none')}",
                fix="set model.name, or model.type and [model.config], to the model that was trained",
            )
    return {name: given[name] for name in wanted}


def _tell(config: Config, folder: Path, step: int, steps: int, adam: Adam) -> None:
    own = {"betas": config.train.betas, "eps": config.train.eps}
    for name, value in adam.options.items():
        theirs = tuple(value) if isinstance(value, list | tuple) else value
        if theirs is not None and theirs != own[name]:
            print(f"note: its AdamW had {name} = {theirs}, and the recipe has {own[name]}", flush=True)
    print(f"{folder}: step {step} of {steps}, {adam.updates} updates; the recipe's run resumes from it", flush=True)
    print(
        f"note: the run goes on with sample {step * config.global_size:,} of dray's own order (batch.global_size = "
        f"{config.global_size}); dray does not know which samples the other program has read",
        flush=True,
    )
