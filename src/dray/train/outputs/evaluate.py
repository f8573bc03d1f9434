"""A saved model on all that its recipe evaluates: a line for each dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dray.contract.image_tasks import Evaluate
from dray.train import objectives, parallel
from dray.train.checkpoint import manifest
from dray.train.collectives import init_distributed
from dray.train.config import Config, of_plan
from dray.train.data import datasets, tokenizer
from dray.train.loop.evaluate import Evaluator
from dray.train.loop.metrics import Metrics
from dray.train.model import attention, build
from dray.train.objectives.base import LossModule
from dray.train.outputs import device_map
from dray.train.parallel.base import Strategy
from dray.train.parallel.ddp import Ddp


class Placed(Ddp):
    """One rank, whose model is where it is: on several devices, from which accelerate's hooks bring what is needed."""

    def _distributed(self, module: LossModule) -> torch.nn.Module:
        return module


def run(job: Evaluate) -> None:
    """By the GPU that the run was planned for, with its batch; else on the CPU, one sample at a time."""
    config = of_plan(job.plan)
    if config.variant == "cpu" or not torch.cuda.is_available():
        config = replace(config, variant="cpu", per_device=1)
    manifest.check_model(Path(job.model), weights=False)  # they are checked as they are read
    saved = replace(
        config.model, name=job.model, weights=True, tokenizer="", config={}, dtype="auto", attn_implementation="auto"
    )
    train = replace(config.train, strategy="ddp", compile=False)
    config = replace(config, model=saved, train=train, lora=None)
    if job.device_map:  # the head's weight may be on another device: its own layer makes the logits
        whole = replace(config.train, loss="full")
        config = replace(config, train=whole, model=replace(config.model, pad_to_multiple_of=0))
    device = init_distributed(config.variant)
    tokens = tokenizer.load(config)
    placed = {}
    if job.device_map:
        shell = build.shell(config, tokens)
        placed = device_map.placed(shell.to(shell.config.dtype or torch.float32))
    network = build.build(config, tokens, filled=True, placed=placed)
    network.requires_grad_(False)  # the optimizer then holds nothing
    attention.install(network, config, device)
    if job.device_map:
        strategy: Strategy = Placed(LossModule(network), config, device_map.first(network))
    else:
        strategy = parallel.make(network, config, device)
    _evaluate(config, tokens, strategy)


def _evaluate(config: Config, tokens: Any, strategy: Strategy) -> None:  # noqa: ANN401  a tokenizer
    objective = objectives.named(config.train.objective)(config, tokens)
    evaluator = Evaluator(config, tokens, strategy, objective, Metrics(config, writes=False))

    evaluator.all(config.steps, datasets.validation(config, tokens))
    test = datasets.test(config, tokens)
    if test is not None:
        evaluator.dataset("test", config.steps, test)
