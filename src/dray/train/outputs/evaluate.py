"""A saved model on all that its recipe evaluates: a line for each dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from dray.contract.jobs import Evaluate
from dray.train import manifest, objectives, strategies
from dray.train.collectives import init_distributed
from dray.train.config import of_plan
from dray.train.data import datasets, tokenizer
from dray.train.evaluate import Evaluator
from dray.train.metrics import Metrics
from dray.train.model import attention, build


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
    device = init_distributed(config.variant)
    tokens = tokenizer.load(config)
    network = build.build(config, tokens, filled=True).requires_grad_(False)  # the optimizer then holds nothing
    attention.install(network, config, device)
    strategy = strategies.make(network, config, device)
    objective = objectives.named(config.train.objective)(config, tokens)
    evaluator = Evaluator(config, tokens, strategy, objective, Metrics(config, writes=False))

    evaluator.all(config.steps, datasets.validation(config, tokens))
    test = datasets.test(config, tokens)
    if test is not None:
        evaluator.dataset("test", config.steps, test)
