"""`python -m dray.train PLAN.json`, on each rank: data, model, loop, evaluation, a saved model that loads again."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from dray.train import card, data, lora, model, objective, parallel, words
from dray.train.checkpoint import Checkpoints
from dray.train.config import Config, read
from dray.train.evaluate import Evaluator
from dray.train.loop import Loop
from dray.train.metrics import Metrics
from dray.train.shards import IDS, Tokens
from dray.train.stop import EXIT_FAILED, guarded, stop

_LARGE = 500_000_000  # weights; what is larger is not loaded once more only to be seen


def main(path: str) -> None:
    """One rank from the first line to the last."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = read(path)
    device, patient = parallel.begin(config)
    tokenizer = words.tokenizer(config)
    model.check(config, tokenizer)  # before the text is read, which may take long
    metrics = Metrics(config, writes=dist.get_rank() == 0)
    texts = data.texts(config, tokenizer)
    config = replace(config, steps=config.steps or max(1, round(config.epochs * texts.total / config.step_tokens)))
    network = model.build(config, tokenizer, filled=model.first())
    parameters = sum(weight.numel() for weight in network.parameters())
    trained = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
    parallel.check_same(network, patient)
    shared = parallel.make(network, config, device)
    task = objective.task(config, tokenizer, words.ended(tokenizer))
    checkpoints = Checkpoints(config, shared, text=texts.training.text, group=patient)
    texts.training.load(checkpoints.resume())
    first = checkpoints.newest or 0
    _began(config, metrics, (parameters, trained), texts, first)

    evaluator = Evaluator(config, tokenizer, shared, task, metrics)
    dist.barrier(group=patient)  # its texts became tokens, which may have taken one node long
    began = time.monotonic()
    loop = Loop(config, parallel=shared, feed=texts.training, task=task, metrics=metrics, checkpoints=checkpoints)
    loop.run(lambda step: evaluator.all(step, texts.validation))
    seconds = time.monotonic() - began
    evaluator.all(config.steps, texts.validation)
    if not math.isfinite(evaluator.found["eval"]["loss"]):
        stop(
            "the model is not finite",
            wanted="a loss on the validation text",
            found=f"NaN or Inf after the last step; {checkpoints.said()}",
            fix="a smaller train.lr or more train.warmup_steps; train.max_grad_norm = 1; bf16 in place of fp16",
            code=EXIT_FAILED,
        )
    if texts.test is not None:
        evaluator.text("test", config.steps, texts.test)
    final = Path(config.run_folder, "checkpoints", "final")
    _save(shared, tokenizer, final, config.model.name)
    if dist.get_rank() == 0:
        card.write(final, config, parameters=parameters, ranks=dist.get_world_size(), figures=evaluator.found)
        steps = config.steps - first
        speed = steps * config.step_tokens / seconds if steps else 0.0
        sample = _reload(final, texts.validation, config) if parameters < _LARGE else ""
        metrics.write("end", "done", tokens_per_s=round(speed, 1), train_seconds=round(seconds, 2), sample=sample)
    metrics.close()
    dist.barrier(group=patient)


def _began(config: Config, metrics: Metrics, weights: tuple[int, int], texts: data.Texts, first: int) -> None:
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, os.environ[config.name_variable])
    tokens = f"{texts.total:,} tokens" if texts.total else "a stream"
    parameters, trained = weights
    part = "" if trained == parameters else f", {trained:,} of them trained"
    metrics.write(
        "start",
        f"{len(hosts)} ranks on {len(set(hosts))} hosts, {parameters:,} parameters{part}, {tokens}",
        world_size=dist.get_world_size(),
        hosts=hosts,
        parameters=parameters,
        trained=trained,
        first_step=first,
        steps=config.steps,
        tokens=texts.total,
        torch=torch.__version__,
    )


def _save(shared: parallel.Parallel, tokenizer: Any, final: Path, base: str) -> None:  # noqa: ANN401  a tokenizer
    """As any user of transformers loads it, whole or not there."""
    network: Any = shared.network
    state = shared.weights()
    if dist.get_rank() == 0:
        part = final.with_name("final.part")
        if lora.on(network):
            lora.save_adapter(network, state, final.with_name("adapter"), base)
            network, state = lora.plain(network), lora.merged(network, state)
        network.save_pretrained(part, state_dict=state)
        tokenizer.save_pretrained(part)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)


def _reload(final: Path, validation: Tokens, config: Config) -> str:
    """Load what was saved the way any user would, and let it write: a save that cannot be loaded is no save."""
    code = {"trust_remote_code": config.model.trust_remote_code}
    tokens: Any = AutoTokenizer.from_pretrained(final, **code)
    if config.objective == "masked":
        AutoModelForMaskedLM.from_pretrained(final, **code)
        return ""
    network: Any = AutoModelForCausalLM.from_pretrained(final, **code).eval()
    prompt = torch.from_numpy(validation.block(0, config.data.sequence_length // 4)[None] & IDS)
    written = network.generate(
        prompt, max_new_tokens=config.data.sequence_length // 2, do_sample=False, pad_token_id=tokens.pad_token_id
    )
    return str(tokens.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    guarded(main, sys.argv[1])
