"""Steps of small models, whose compiled graphs are counted: `python graphs.py MODELS`, one rank."""

from __future__ import annotations

import functools
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from dray.train import parallel
from dray.train.model import attention
from dray.train.objectives.base import Batch

CPU = torch.device("cpu")
TRAIN: dict[str, Any] = {
    "precision": "bf16", "compile": True, "loss": "full", "optimizer": "adamw", "ema_decay": 0.0, "lr": 1e-3,
    "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0, "fsdp_shard": "auto",
    "reshard_after_forward": "auto",
}  # fmt: skip


def seen(kind: str, settings: dict[str, Any], strategy: str, checkpointing: bool) -> list[Any]:
    """Breaks, frames, graphs and losses of two steps and an evaluation."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(1)
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    network = auto.from_config(AutoConfig.for_model(kind, **settings))
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    config: Any = SimpleNamespace(
        train=SimpleNamespace(**TRAIN, strategy=strategy),
        model=SimpleNamespace(pad_to_multiple_of=1),
        gradient_accumulation_steps=1,
        analog=None,
    )
    network.set_attn_implementation(attention._SDPA)
    made: Any = parallel.make(network, config, CPU)
    rows, losses = torch.arange(64).view(2, 32), []
    for _ in range(2):
        network.train()
        with made.accumulate(sync=True):
            loss, _ = made.losses(Batch(rows, rows, None))
            made.backward(loss)
        losses.append(float(loss.detach()))
        made.update(1e-3)
    network.eval()
    with torch.no_grad():
        made.losses(Batch(rows, rows, None))
    frames, stats = (dict(torch._dynamo.utils.counters[name]) for name in ("frames", "stats"))
    breaks = {str(why).splitlines()[0]: count for why, count in torch._dynamo.utils.counters["graph_break"].items()}
    return [breaks, frames, stats, losses]


def main(models: str) -> None:
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    dist.init_process_group("gloo")
    attention.look_for_documents(False)
    for kind, settings in json.loads(models).items():
        for strategy in ("ddp", "fsdp"):
            for checkpointing in (False, True):
                found = seen(kind, settings, strategy, checkpointing)
                print(json.dumps([kind, strategy, checkpointing, *found]), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
