"""`python -m dray.train PLAN.json`, on each rank: data, model, loop, evaluation, a saved model that loads again."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from dray.train import data, loop, model, parallel
from dray.train.checkpoint import Checkpoints, due
from dray.train.config import Config, read
from dray.train.metrics import Metrics, perplexity
from dray.train.shards import Tokens


def main(path: str) -> NoReturn:
    """One rank from the first line to the last."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = read(path)
    tokenizer = data.tokenizer()
    training, validation = data.splits(config, tokenizer, lambda text: print(text, flush=True))
    torch.manual_seed(config.seed)
    network = model.build(config, tokenizer)
    device = parallel.begin(config)
    rank = dist.get_rank()
    metrics = Metrics(f"{config.folder}/metrics.jsonl", writes=rank == 0)
    if config.compile:
        network.compile()
    shared = parallel.make(network, config, device)
    run = loop.Loop(config, shared, training, metrics)
    checkpoints = Checkpoints(
        Path(config.folder, "checkpoints"),
        shared,
        about=config.about,
        keep=config.keep,
        say=lambda text: print(text, flush=True),
    )
    first = checkpoints.resume()
    _began(config, metrics, shared.network, training, first)
    seconds = run.run(first, lambda step: checkpoints.save(step) if due(step, config.every) else None)
    steps = config.steps - first
    loss = loop.evaluate(config, shared, validation)
    metrics.write(
        "eval", f"evaluation loss {loss:.4f}, perplexity {perplexity(loss):.3f}", loss=loss, perplexity=perplexity(loss)
    )
    final = f"{config.folder}/checkpoints/final"
    _save(shared, final)
    if rank == 0:
        tokenizer.save_pretrained(final)
        sample = _reload(final, validation, config)
        speed = steps * config.global_size * config.block / seconds if steps else 0.0
        metrics.write("end", "done", tokens_per_s=round(speed, 1), train_seconds=round(seconds, 2), sample=sample)
    dist.barrier()
    _leave(0)


def _began(config: Config, metrics: Metrics, network: torch.nn.Module, training: Tokens, first: int) -> None:
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, os.environ[config.name_variable])
    parameters = sum(weight.numel() for weight in network.parameters())
    metrics.write(
        "start",
        f"{len(hosts)} ranks on {len(set(hosts))} hosts, {parameters:,} parameters, {len(training.ids):,} tokens",
        world_size=dist.get_world_size(),
        hosts=hosts,
        parameters=parameters,
        first_step=first,
        steps=config.steps,
        tokens=len(training.ids),
        torch=torch.__version__,
    )


def _save(shared: parallel.Parallel, final: str) -> None:
    """As any user of transformers loads it; where ranks have parts, they come together on the first."""
    network: Any = shared.network
    state = shared.weights()
    if dist.get_rank() == 0:
        network.save_pretrained(final, state_dict=state)


def _leave(code: int) -> NoReturn:
    """End without taking anything apart.

    Seen with torch 2.13: the last reference to a gloo group goes while the interpreter's lock is held, its destructor
    waits for a worker thread, and that thread waits for the lock to drop a tensor. One run in ten never ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _reload(final: str, validation: Tokens, config: Config) -> str:
    """Load what was saved the way any user would, and let it write: a save that cannot be loaded is no save."""
    tokens: Any = AutoTokenizer.from_pretrained(final)
    network: Any = AutoModelForCausalLM.from_pretrained(final).eval()
    prompt = torch.from_numpy(validation.block(0, config.block // 4)[None])
    written = network.generate(
        prompt, max_new_tokens=config.block // 2, do_sample=False, pad_token_id=tokens.pad_token_id
    )
    return str(tokens.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except SystemExit as stopped:
        _leave(stopped.code if isinstance(stopped.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
