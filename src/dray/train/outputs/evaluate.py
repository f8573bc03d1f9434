"""Evaluate a saved model on all datasets of its recipe: a line for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from dray.contract.trainer.image_tasks import Evaluate
from dray.train import objectives, parallel
from dray.train.checkpoint import manifest
from dray.train.collectives import init_distributed
from dray.train.config import of_plan
from dray.train.data import datasets, tokenizer
from dray.train.loop.evaluate import Evaluator
from dray.train.loop.metrics import Metrics
from dray.train.model import attention, build
from dray.train.objectives.base import LossModule
from dray.train.outputs.generate import require_in_memory
from dray.train.parallel.base import Strategy
from dray.train.parallel.ddp import Ddp


class OnSeveralDevices(Ddp):
    """One rank, whose layers accelerate has placed; its hooks move what they need."""

    def _distributed(self, module: LossModule) -> torch.nn.Module:
        return module


def run(job: Evaluate) -> None:
    """Evaluate on the GPU that the run was planned for, with its batch; else on the CPU, one sample at a time."""
    config = of_plan(job.plan)
    if config.variant == "cpu" or not torch.cuda.is_available():
        config = replace(config, variant="cpu", per_device=1)
    manifest.check_model(Path(job.model), weights=False)  # they are checked as they are read
    saved = replace(
        config.model, name=job.model, weights=True, tokenizer="", config={}, dtype="auto", attn_implementation="auto"
    )
    train = replace(config.train, strategy="ddp", compile=False)
    if job.device_map:  # the head's weight may be on another device: its own layer makes the logits
        saved, train = replace(saved, pad_to_multiple_of=0), replace(train, loss="full")
    config = replace(config, model=saved, train=train, lora=None)
    device = init_distributed(config.variant)
    tokens = tokenizer.load(config)
    network = build.build(
        config, tokens, with_weights=True, device_map={"device_map": "auto"} if job.device_map else None
    )
    network.requires_grad_(False)  # the optimizer then holds nothing
    attention.install(network, config, device)
    if job.device_map:
        require_in_memory(network)
        strategy: Strategy = OnSeveralDevices(LossModule(network), config, network.device)
    else:
        strategy = parallel.make(network, config, device)
    objective = objectives.named(config.train.objective)(config, tokens)
    evaluator = Evaluator(config, tokens, strategy, objective, Metrics(config, writes=False))
    evaluator.all(config.steps, datasets.validation(config, tokens))
    test = datasets.test(config, tokens)
    if test is not None:
        evaluator.dataset("test", config.steps, test)
