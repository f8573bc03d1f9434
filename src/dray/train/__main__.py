"""`python -m dray.train PLAN.json`, on each rank: read data, build the model, take steps, evaluate, save the model."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from dray.contract.findings import ConfigError, DrayError, counted
from dray.contract.heartbeat import LOAD, MODEL
from dray.train import objectives, parallel, ranks
from dray.train.checkpoint import checkpoints as checkpoint
from dray.train.checkpoint.checkpoints import Checkpoints
from dray.train.collectives import all_gather_json, barrier, init_distributed
from dray.train.config import Config, read
from dray.train.data import datasets, tokenizer
from dray.train.data.datasets import Datasets
from dray.train.errors import guarded, say
from dray.train.loop.evaluate import Evaluator
from dray.train.loop.loop import NOT_FINITE, Loop
from dray.train.loop.metrics import Metrics, flops_per_token
from dray.train.model import attention, build
from dray.train.outputs import export, final_model
from dray.train.parallel.base import Strategy, check_same
from dray.train.runtime import numerics
from dray.train.runtime.compiled import Compiled
from dray.train.runtime.heartbeat import boottime, heartbeat
from dray.train.runtime.stop import Stop

_IMPORTED_NS = boottime()


def main(path: str) -> None:  # noqa: PLR0915  a training reads from top to bottom
    """Run one rank of a training from start to end."""
    logging.set_verbosity_error()  # transformers logs hints for its Trainer, which dray does not use
    logging.disable_progress_bar()
    config = read(path)
    heartbeat.begin(config.hang_timeout_s, _IMPORTED_NS)
    device = init_distributed(config.variant)
    first_rank = ranks.rank() == 0
    stop = Stop()
    numerics.set_up(config, device)

    # The data. Check the tokenizer, the model's settings and the checkpoint folder first: reading may take hours.
    tokens = tokenizer.load(config)
    build.check(config, tokens)
    lease, metrics = checkpoint.lock_folder(config), Metrics(config, writes=first_rank)
    data = datasets.load(config, tokens)
    config = replace(config, steps=data.steps(config))

    # The newest checkpoint. A run that resumes takes its weights from it, so `build` initializes none.
    heartbeat.lap(MODEL)
    if first_rank:
        export.recover(Path(config.final_model))
    checkpoints = Checkpoints(config, metrics, lease, dataset=data.training.identity)
    resumes = checkpoints.find()
    first_step = checkpoints.newest or 0
    _require_not_past_end(config, first_step)
    heartbeat.lap(LOAD)

    # The model and its strategy.
    network = build.build(config, tokens, with_weights=build.has_weights(), resumes=resumes, device=device)
    sizes = [(weight.numel(), weight.requires_grad) for weight in network.parameters()]  # before fsdp shards them
    check_same(network)
    compiled = Compiled(config, device)
    compiled.load()
    say(f"attention: {attention.install(network, config, device)}")
    strategy = parallel.make(network, config, device)
    objective = objectives.named(config.train.objective)(config, tokens)
    checkpoints.attach(strategy)
    heartbeat.lap(MODEL)
    data.training.load(checkpoints.resume())
    checkpoints.reserve(data.training.state())
    heartbeat.lap(LOAD)
    parameters, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    metrics.write(
        "start", **_start(config, data, strategy, parameters=parameters, trained=trained, first_step=first_step)
    )

    # The steps.
    evaluator = Evaluator(config, tokens, strategy, objective, metrics)
    barrier()  # wait until all nodes have their datasets
    began = time.monotonic()
    loop = Loop(
        config, strategy=strategy, feed=data.training, objective=objective, metrics=metrics, checkpoints=checkpoints,
        compiled=compiled, stop=stop,
    )  # fmt: skip
    loop.run(lambda step: evaluator.all(step, data.validation))
    seconds = time.monotonic() - began

    # The end: the last evaluation, the final model, the last line of metrics.jsonl.
    strategy.use_averages()
    evaluator.all(config.steps, data.validation)
    compiled.keep()
    _require_finite(evaluator.figures[datasets.VALIDATION]["loss"], checkpoints)
    if data.test is not None:
        evaluator.dataset("test", config.steps, data.test)
    sample = ""
    if config.checkpoint.final:
        final_model.save(config, strategy, tokens, parameters=parameters, figures=evaluator.figures)
        if first_rank:
            sample = final_model.sample(config, next(iter(data.validation.values())), device)
    speed = (config.steps - first_step) * config.step_tokens / seconds
    metrics.write("end", "done", tokens_per_s=round(speed, 1), train_seconds=round(seconds, 2), sample=sample)
    checkpoints.close()
    metrics.close()
    barrier()
    checkpoints.require_saved()


def _require_not_past_end(config: Config, first_step: int) -> None:
    """Refuse a checkpoint that is past train.steps: its model would be saved as one of so few steps."""
    if first_step > config.steps:
        raise ConfigError(
            "the newest checkpoint is past the run's last step",
            where=config.checkpoints,
            wanted=f"at most step {config.steps} (train.steps)",
            found=f"step {first_step}",
            fix=f"train.steps={first_step}, or another checkpoint.folder",
        )
    if first_step == config.steps:
        say(f"nothing left to do: step {first_step} of {config.steps}")


def _require_finite(loss: float, checkpoints: Checkpoints) -> None:
    if not math.isfinite(loss):
        raise DrayError(
            "the model is not finite",
            wanted="a finite loss on the validation dataset",
            found=f"NaN or Inf after the last step; {checkpoints.newest_text()}",
            fix=NOT_FINITE,
        )


def _start(
    config: Config, data: Datasets, strategy: Strategy, *, parameters: int, trained: int, first_step: int
) -> dict[str, Any]:
    """Return the fields of the `start` line; `shown` is its text in the log."""
    hosts = all_gather_json(os.environ[config.host_variable])
    tokens = data.total - data.packing.get("padding", 0)
    size = f"{tokens:,} tokens" if tokens else "a stream"
    part = "" if trained == parameters else f", {trained:,} of them trained"
    ranks_text = f"{counted(len(hosts), 'rank')} on {counted(len(set(hosts)), 'host')}"
    line = {
        "shown": f"{ranks_text}, {parameters:,} parameters{part}, {size}",
        "world_size": len(hosts),
        "hosts": hosts,
        "parameters": parameters,
        "trainable_parameters": trained,
        "first_step": first_step,
        "steps": config.steps,
        "tokens": tokens,
        "torch": torch.__version__,
        "device": "" if strategy.device.type == "cpu" else torch.cuda.get_device_name(strategy.device),
        "flops_per_token": flops_per_token(strategy.network, config, config.data.sequence_length),
        "data": data.contents,
    }
    return line | ({"packing": data.packing} if data.packing else {})


if __name__ == "__main__":
    guarded(main, sys.argv[1])
