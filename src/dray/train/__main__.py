"""`python -m dray.train PLAN.json`, on each rank: data, model, loop, evaluation, a saved model that loads again."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from dray.contract.findings import ConfigError, DrayError, counted
from dray.contract.heartbeat import LOAD, MODEL
from dray.train import objectives, parallel, ranks
from dray.train.checkpoint import checkpoints as checkpoint
from dray.train.checkpoint import manifest
from dray.train.checkpoint.checkpoints import Checkpoints
from dray.train.collectives import all_gather_json, barrier, init_distributed
from dray.train.config import Config, read
from dray.train.data import datasets, tokenizer
from dray.train.data.datasets import Datasets
from dray.train.data.token_cache import IDS, Tokens
from dray.train.errors import guarded, say
from dray.train.loop.evaluate import Evaluator
from dray.train.loop.loop import NOT_FINITE, Loop
from dray.train.loop.metrics import Metrics, flops_per_token
from dray.train.model import attention, build, lora
from dray.train.outputs import card, export
from dray.train.parallel.base import Strategy, check_same
from dray.train.parallel.ddp import HALF
from dray.train.runtime import numerics
from dray.train.runtime.compiled import Compiled
from dray.train.runtime.heartbeat import boottime, heartbeat
from dray.train.runtime.stop import Stop

_IMPORTED, _IMPORTED_NS = time.time(), boottime()
_NEW = 64  # tokens of the sample, for which all ranks wait
_FILE = 2 * 10**9  # bytes of one file of the final model, which safetensors copies once more in the host's memory


def main(path: str) -> None:
    """One rank from the first line to the last."""
    _be_quiet()
    config = read(path)
    heartbeat.begin(config.hang_timeout_s, _IMPORTED_NS)
    device = init_distributed(config.variant)
    stop = Stop()
    numerics.set_up(config, device)
    tokens = tokenizer.load(config)
    build.check(config, tokens)  # before datasets are read, which may take long
    lease, metrics = checkpoint.take(config), Metrics(config, writes=ranks.rank() == 0)
    data = datasets.load(config, tokens)
    config = replace(config, steps=data.steps(config))
    checkpoints = Checkpoints(config, metrics, lease, dataset=data.training.identity)
    restored, find_s = _find(config, checkpoints)
    network = build.build(config, tokens, filled=build.has_weights(), restored=restored, device=device)
    parameters, trained = _sizes(network)
    check_same(network)
    numerics.keep_rotary_exact(network)
    compiled = Compiled(config, device)
    compiled.load()
    say(f"attention: {attention.install(network, config, device)}")
    strategy = parallel.make(network, config, device)
    objective = objectives.named(config.train.objective)(config, tokens)
    checkpoints.use(strategy)
    load_s = find_s + _load(data, checkpoints)
    resumed = checkpoints.newest or 0
    _write_start(
        config, metrics, parameters=parameters, trained=trained, data=data, step=resumed,
        load_s=load_s, strategy=strategy,
    )  # fmt: skip

    evaluator = Evaluator(config, tokens, strategy, objective, metrics)
    barrier()  # the first node to have its datasets waits for the last
    began = time.monotonic()
    loop = Loop(
        config, strategy=strategy, feed=data.training, objective=objective, metrics=metrics, checkpoints=checkpoints,
        compiled=compiled, stop=stop,
    )  # fmt: skip
    loop.run(lambda step: evaluator.all(step, data.validation))
    seconds = time.monotonic() - began
    strategy.use_averages()
    evaluator.all(config.steps, data.validation)
    compiled.keep()
    if not math.isfinite(evaluator.found[datasets.VALIDATION]["loss"]):
        raise DrayError(
            "the model is not finite",
            wanted="a finite loss on the validation dataset",
            found=f"NaN or Inf after the last step; {checkpoints.newest_text()}",
            fix=NOT_FINITE,
        )
    if data.test is not None:
        evaluator.dataset("test", config.steps, data.test)
    sample = ""
    if config.checkpoint.final:
        validation = next(iter(data.validation.values()))
        sample = _keep(config, strategy, tokens, validation, parameters=parameters, figures=evaluator.found)
    if ranks.rank() == 0:
        _write_end(config, metrics, steps=config.steps - resumed, seconds=seconds, sample=sample)
    checkpoints.close()
    metrics.close()
    barrier()
    checkpoints.require_saved()


def _write_end(config: Config, metrics: Metrics, *, steps: int, seconds: float, sample: str) -> None:
    speed = steps * config.step_tokens / seconds if steps else 0.0
    metrics.write("end", "done", tokens_per_s=round(speed, 1), train_seconds=round(seconds, 2), sample=sample)


def _be_quiet() -> None:
    """transformers' own words are about another trainer."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _sizes(network: torch.nn.Module) -> tuple[int, int]:
    """How many parameters it has, and how many of them are trained."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in network.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _find(config: Config, checkpoints: Checkpoints) -> tuple[bool, float]:
    """Whether there is a checkpoint to resume from, with steps left to do; seconds of looking and checking."""
    heartbeat.lap(MODEL)
    if ranks.rank() == 0:
        export.recover(Path(config.final_model))
    looking = time.monotonic()
    found = checkpoints.find()
    heartbeat.lap(LOAD)
    _require_steps(config, checkpoints.newest or 0)
    return found, time.monotonic() - looking


def _load(data: Datasets, checkpoints: Checkpoints) -> float:
    """Load the checkpoint, if there is one; seconds of reading it."""
    heartbeat.lap(MODEL)
    loading = time.monotonic()
    data.training.load(checkpoints.resume())
    checkpoints.reserve(data.training.state())
    heartbeat.lap(LOAD)
    return time.monotonic() - loading


def _require_steps(config: Config, resumed: int) -> None:
    """Steps to take; a model that has taken more would be saved and evaluated as one of fewer."""
    if resumed > config.steps:
        raise ConfigError(
            "the newest checkpoint is past the run's last step",
            where=config.checkpoints,
            wanted=f"at most step {config.steps} (train.steps)",
            found=f"step {resumed}",
            fix=f"train.steps={resumed}, or another checkpoint.folder",
        )
    if resumed == config.steps:
        say(f"nothing left to do: step {resumed} of {config.steps}")


def _write_start(
    config: Config, metrics: Metrics, *, parameters: int, trained: int, data: Datasets, step: int, load_s: float,
    strategy: Strategy,
) -> None:  # fmt: skip
    hosts = all_gather_json(os.environ[config.host_variable])
    tokens = data.total - data.packing.get("padding", 0)
    size = f"{tokens:,} tokens" if tokens else "a stream"
    part = "" if trained == parameters else f", {trained:,} of them trained"
    metrics.write(
        "start",
        f"{counted(len(hosts), 'rank')} on {counted(len(set(hosts)), 'host')}, {parameters:,} parameters{part}, {size}",
        world_size=ranks.world(),
        hosts=hosts,
        parameters=parameters,
        trainable_parameters=trained,
        first_step=step,
        load_s=round(load_s, 3),
        steps=config.steps,
        tokens=tokens,
        **({"packing": data.packing} if data.packing else {}),
        torch=torch.__version__,
        device="" if strategy.device.type == "cpu" else torch.cuda.get_device_name(strategy.device),
        flops_per_token=flops_per_token(strategy.network, config),
        imported=round(_IMPORTED, 3),
        data=data.contents,
    )


def _keep(
    config: Config, strategy: Strategy, tokens: Any, validation: Tokens, *, parameters: int,  # noqa: ANN401  a tokenizer
    figures: dict[str, dict[str, float]],
) -> str:  # fmt: skip
    """Save the model and its card; on the first rank, what it generates once it is loaded again."""
    final = Path(config.final_model)
    _save(config, strategy, tokens, final)
    if ranks.rank():
        return ""
    card.write(final, config, parameters=parameters, ranks=ranks.world(), figures=figures)
    return _reload(final, validation, config, strategy.device)


def _save(config: Config, strategy: Strategy, tokens: Any, final: Path) -> None:  # noqa: ANN401  a tokenizer
    """A folder that `from_pretrained` loads; atomic. A 16-bit run's has its 16 bits."""
    network: Any = strategy.network
    adapters = {}
    if lora.on(network):
        adapters = {name: weight.detach().clone() for name, weight in strategy.weights() if ".lora_" in name}
    if ranks.rank():
        for _ in strategy.weights():  # rank 0 cannot gather alone
            pass
        return
    dtype, part = HALF.get(config.train.precision), final.with_name(f"{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shell = network
        if adapters:
            lora.save_adapter(network, adapters, final.with_name("adapter"), config.model.name)
            shell = lora.plain(network)
        shell.save_pretrained(part, state_dict={})  # its configuration and its own code
        (part / "model.safetensors").unlink(missing_ok=True)
        weights = export.named_as_saved(shell, _final_weights(strategy, adapters))
        export.write_weights(part, weights, dtype, limit=_FILE)
        if dtype:
            shell.config.dtype = dtype
            shell.config.save_pretrained(part)
        tokens.save_pretrained(part)
        manifest.seal_model(part)
    except Exception:  # a full disk: what was there before has its room again
        shutil.rmtree(part, ignore_errors=True)
        raise
    export.swap(part, final)


def _final_weights(strategy: Strategy, adapters: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each whole weight, with its adapter merged."""
    for name, weight in strategy.weights():
        heartbeat.beat()
        if adapters:
            yield from lora.merged(strategy.network, {**adapters, name: weight}).items()
        else:
            yield name, weight


def _reload(final: Path, validation: Tokens, config: Config, device: torch.device) -> str:
    """Load what was saved as a user would, and let it generate: a model that cannot be loaded was not saved."""
    size = sum(path.stat().st_size for path in final.glob("*.safetensors"))
    if not _fits(size, device):
        say(f"the final model is not loaded again: {size / 1e9:.1f} GB do not fit beside the training on this GPU")
        return ""
    code, objective = config.model.trust_remote_code, objectives.named(config.train.objective)
    tokens: Any = AutoTokenizer.from_pretrained(final, trust_remote_code=code)
    network: Any = objective.auto_model.from_pretrained(final, trust_remote_code=code).eval().to(device)
    if not objective.predicts_next:
        return ""
    length = config.data.sequence_length
    prompt = torch.from_numpy(validation.slice(0, length // 4)[None] & IDS).to(device)
    new = min(length // 2, _NEW)
    written = network.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=tokens.pad_token_id)
    return str(tokens.decode(written[0], skip_special_tokens=True))


def _fits(size: int, device: torch.device) -> bool:
    """Whether a model of so many bytes, and a quarter more to generate with, fits beside the training."""
    if device.type == "cpu":
        return True
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free >= 1.25 * size


if __name__ == "__main__":
    guarded(main, sys.argv[1])
