"""`python -m dray.train PLAN.json`, on each rank: data, model, loop, evaluation, a saved model that loads again."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from dray.train import data, model
from dray.train.config import Config, read
from dray.train.metrics import Metrics, Report, perplexity


def main(path: str) -> NoReturn:
    """One rank from the first line to the last."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = read(path)
    torch.manual_seed(config.seed)
    tokens = data.tokenizer()
    training, validation = data.splits(config, tokens)
    network = model.build(config, tokens)
    arguments = _arguments(config)
    rank = int(os.environ["RANK"])
    metrics = Metrics(f"{config.folder}/metrics.jsonl", writes=rank == 0)
    report = Report(metrics, config)
    hosts = _hosts(config)
    parameters = sum(weight.numel() for weight in network.parameters())
    metrics.write(
        "start",
        f"{config.world_size} ranks on {len(set(hosts))} hosts, {parameters:,} parameters, {len(training)} blocks",
        world_size=dist.get_world_size(),
        hosts=hosts,
        parameters=parameters,
        steps=config.steps,
        blocks=len(training),
        torch=torch.__version__,
    )
    trainer = Trainer(
        model=network, args=arguments, train_dataset=training, eval_dataset=validation, callbacks=[report]
    )
    trainer.remove_callback(PrinterCallback)  # prints what metrics already say
    trainer.train()
    speed, seconds = report.average_speed(config.steps)
    loss = trainer.evaluate()["eval_loss"]
    metrics.write(
        "eval", f"evaluation loss {loss:.4f}, perplexity {perplexity(loss):.3f}", loss=loss, perplexity=perplexity(loss)
    )
    final = f"{config.folder}/checkpoints/final"
    trainer.save_model(final)
    if rank == 0:
        tokens.save_pretrained(final)
        sample = _reload(final, validation, config)
        metrics.write("end", "done", tokens_per_s=speed, train_seconds=seconds, sample=sample)
    dist.barrier()
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End without taking anything apart.

    Seen with torch 2.13: the last reference to a gloo group goes while the interpreter's lock is held, its destructor
    waits for a worker thread, and that thread waits for the lock to drop a tensor. One run in ten never ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _arguments(config: Config) -> TrainingArguments:
    on_cpu = config.variant == "cpu"
    return TrainingArguments(
        output_dir=f"{config.folder}/checkpoints",
        per_device_train_batch_size=config.per_device,
        per_device_eval_batch_size=config.per_device,
        gradient_accumulation_steps=config.accumulation,
        max_steps=config.steps,
        learning_rate=config.lr,
        lr_scheduler_type=config.schedule,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        bf16=config.precision == "bf16",
        seed=config.seed,
        logging_steps=config.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # else a loss that is NaN is logged as 0
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=not on_cpu,
    )


def _hosts(config: Config) -> list[str]:
    """The host of each rank, told by the ranks themselves."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, os.environ[config.name_variable])
    return hosts


def _reload(final: str, validation: data.Blocks, config: Config) -> str:
    """Load what was saved the way any user would, and let it write: a save that cannot be loaded is no save."""
    tokens: Any = AutoTokenizer.from_pretrained(final)
    network: Any = AutoModelForCausalLM.from_pretrained(final).eval()
    prompt = validation.rows[:1, : config.block // 4]
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
