"""Another program's checkpoint as a model that `from_pretrained` loads, or as one that a recipe's run resumes from."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from dray.contract.findings import ConfigError, counted, listed
from dray.contract.trainer.image_tasks import Importing
from dray.train import errors
from dray.train.checkpoint import checkpoints, manifest, staging
from dray.train.checkpoint.shards import Shards, whole_shards
from dray.train.config import of_recipe
from dray.train.data import datasets, tokenizer
from dray.train.importing import zero
from dray.train.importing.source import Adam, Source, read_distributed, read_file, read_trainer, reading, without_prefix
from dray.train.model import build
from dray.train.parallel.base import buffers

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COPIED_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def run(job: Importing) -> None:
    """Write the model, the checkpoint, or both."""
    path = Path(job.source)
    with reading(path):
        source = _find(path, trust=job.trust)
    print(f"{path}: {source.kind}, {counted(len(source.weights), 'tensor')}", flush=True)
    adam = None
    if job.recipe:
        if not source.adam:
            raise ConfigError(
                "a run cannot resume from this checkpoint",
                where=path,
                wanted="AdamW's averages by the names of their weights, as DeepSpeed and torch's DCP save them",
                found=source.kind,
                fix="start a new training from its weights: "
                f"dray model import {shlex.quote(job.source)} --to FOLDER, then model.name=FOLDER in the recipe",
            )
        with reading(path):
            adam = source.adam()
    if job.target:
        _write_model(job, source)
    if adam:
        _write_checkpoint(job, source, adam)


def _find(path: Path, *, trust: bool) -> Source:
    """Detect the kind of checkpoint by its file names, and read it."""
    if path.is_file():
        return Source("weights alone", path.absolute().parent, read_file(path, trust=trust))
    source = zero.read(path, trust=trust) or read_distributed(path) or read_trainer(path, trust=trust)
    if source:
        return source
    raise ConfigError(
        "there is no checkpoint that can be imported",
        where=path,
        wanted="a folder of transformers' Trainer (checkpoint-N), of DeepSpeed (global_stepN) or of torch's DCP "
        "(.metadata), or a .safetensors, .bin, .pt or .pth file",
        found=", ".join(sorted(file.name for file in path.iterdir())[:8]) or "an empty folder",
        fix="name another folder; for a run of dray: dray model export RUN",
    )


def _write_model(job: Importing, source: Source) -> None:
    """Let transformers load the weights, which knows older names of them, and save the model into a new folder."""
    target, folder = Path(job.target), Path(job.config or source.folder)
    config, auto_model = _config(folder, source)
    with torch.device("meta"):
        shell: PreTrainedModel = auto_model.from_config(config, trust_remote_code=False)
    weights = without_prefix(source.weights, shell.state_dict(), shell.base_model_prefix, job.prefix)
    floating = [weight.dtype for weight in weights.values() if weight.is_floating_point()]
    dtype = _TYPES.get(job.dtype) or max(floating, key=lambda dtype: dtype.itemsize, default=torch.float32)
    try:
        network, report = type(shell).from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
        )
    except (RuntimeError, ValueError) as error:
        raise _other_model(folder, "tensors of the configuration's shapes", errors.message(error)) from error
    if missing := sorted(report["missing_keys"]):
        raise _other_model(folder, listed(missing, most=1), f"names such as {next(iter(weights), '')}")
    part = _new_folder(target.with_name(f"{target.name}.part"))
    network.config.__dict__.pop("auto_map", None)  # names code files, which are not copied
    network.save_pretrained(part, max_shard_size="4GB")
    for name in _COPIED_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, part / name)
    manifest.seal_model(part)
    part.rename(target)
    unused = sorted(report["unexpected_keys"])
    note = f"; not used: {', '.join(unused[:3])}" if unused else ""
    print(f"{target}: {type(network).__name__}, {network.num_parameters():,} parameters of {dtype}{note}", flush=True)
    if not (target / "tokenizer.json").exists():
        print(f"{folder} has no tokenizer.json: set model.tokenizer, or import again with --config FOLDER")
    print(f"to train it further: model.name={target.absolute()}", flush=True)


def _config(folder: Path, source: Source) -> tuple[PreTrainedConfig, type[AutoModelForCausalLM | AutoModelForMaskedLM]]:
    """The model's configuration, and the class that loads such models."""
    fix = "--config FOLDER: a folder that save_pretrained wrote for the model that was trained"
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "the checkpoint has no config.json", where=folder, wanted="a config.json beside the tensors",
            found=source.kind, fix=fix,
        )  # fmt: skip
    with reading(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture = next(iter(config.architectures or []), "")
    if architecture.endswith("ForMaskedLM"):
        return config, AutoModelForMaskedLM
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return config, AutoModelForCausalLM
    raise ConfigError(
        "dray does not train this kind of model",
        where=folder / "config.json",
        wanted="a causal or masked language model",
        found=architecture or "no architectures",
        fix=fix,
    )


def _other_model(where: Path, wanted: str, found: str) -> ConfigError:
    return ConfigError(
        "the checkpoint is of another model",
        where=where,
        wanted=wanted,
        found=found,
        fix="use the configuration of the model that was trained: --config FOLDER, or [model] of the recipe",
    )


def _write_checkpoint(job: Importing, source: Source, adam: Adam) -> None:
    """Write it as one rank does; any number of ranks of any strategy resumes from it."""
    config = of_recipe(job.recipe)
    tokens = tokenizer.load(config)
    shell = build.shell(config, tokens)
    shell.tie_weights()
    trained, names = dict(shell.named_parameters()), shell.state_dict()
    weights = without_prefix(source.weights, names, shell.base_model_prefix, job.prefix)
    batches = [_shards("weights", trained, weights, job), _shards("others", buffers(shell), weights, job)]
    for kind, moments in adam.moments.items():
        batches.append(_shards(kind, trained, without_prefix(moments, names, shell.base_model_prefix, None), job))
    step = source.step or adam.updates
    data = datasets.load(config, tokens)
    steps = data.steps(config)
    if not 1 <= step <= steps:
        raise ConfigError(
            "the checkpoint's step is not a step of the recipe",
            where=job.source,
            wanted=f"a step from 1 to {steps}, the recipe's train.steps",
            found=f"step {step}",
            fix=f"train.steps={step} or more, or import its weights: --to FOLDER",
        )
    folder = Path(config.checkpoints) / f"step-{step}"
    part = _new_folder(folder.with_name(f"{folder.name}.part-import"))
    about = {
        "step": step,
        "updates": adam.updates,
        "run": "",
        "image_sha256": "",
        "dray": f"import of {source.kind}",
        "world_size": 1,
        "order": checkpoints.order(config, data.training.identity),
    }
    staging.write(part, (batch for batch in batches if batch), about)
    part.rename(folder)
    manifest.sync(folder.parent)
    print(f"{folder}: step {step} of {steps}, {adam.updates} updates; the recipe's run resumes from it", flush=True)


def _shards(kind: str, model: dict[str, torch.Tensor], given: dict[str, torch.Tensor], job: Importing) -> Shards:
    """The shards of this kind, one for each tensor of the model; refuse missing names and other shapes."""
    for name, tensor in model.items():
        if name not in given:
            raise _other_model(Path(job.source), name, f"{kind} such as {next(iter(given), 'none')}")
        if given[name].shape != tensor.shape:
            raise _other_model(Path(job.source), f"{name} {[*tensor.shape]}", f"{kind} {[*given[name].shape]}")
    return whole_shards(kind, {name: given[name] for name in model})


def _new_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o755, parents=True)
    return folder
