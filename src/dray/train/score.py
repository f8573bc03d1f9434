"""`python -m dray.train.score FOLDER PLAN`: a saved model on all that its recipe evaluates."""

from __future__ import annotations

import sys
from dataclasses import replace

from transformers.utils import logging

from dray.train import data, model, objective, parallel, words
from dray.train.config import read
from dray.train.evaluate import Evaluator
from dray.train.metrics import Metrics
from dray.train.stop import guarded


def main(folder: str, plan: str) -> None:
    """A line for each text."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = read(plan)
    saved = replace(
        config.model, name=folder, weights=True, tokenizer="", config={}, dtype="auto", attn_implementation="auto"
    )
    config = replace(config, model=saved, variant="cpu", per_device=1, strategy="ddp", compile=False, lora=None)
    device, _ = parallel.begin(config)
    tokenizer = words.tokenizer(config)
    shared = parallel.make(model.build(config, tokenizer, filled=True), config, device)
    task = objective.task(config, tokenizer, words.ended(tokenizer))
    evaluator = Evaluator(config, tokenizer, shared, task, Metrics(config, writes=False))

    evaluator.all(config.steps, data.validation(config, tokenizer))
    test = data.test(config, tokenizer)
    if test is not None:
        evaluator.text("test", config.steps, test)


if __name__ == "__main__":
    guarded(main, *sys.argv[1:])
