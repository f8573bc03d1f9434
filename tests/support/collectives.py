"""Four ranks, as two nodes of two, train a tiny Llama in several ways: what a step sends and casts, and its losses.

python collectives.py PLAN.json, and a line of JSON for each case on stdin; the answers of rank 0 are on stdout.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from dray.train import collectives, parallel
from dray.train.checkpoint import shards, staging
from dray.train.config import read
from dray.train.objectives.base import Batch
from dray.train.parallel import fsdp

fsdp._GROUP_NUMEL = 1  # each layer is a group, as layers of real models are

RANKS, STEPS, MICRO, WORDS = 4, 3, 2, 96
SIZES = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip


class Counted(TorchDispatchMode):
    """Collectives by name, and casts of whole weights."""

    def __init__(self, shapes: set) -> None:
        super().__init__()
        self.found, self.shapes = Counter(), shapes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split(".")[0]
        if name.startswith("c10d::"):
            self.found[name.removeprefix("c10d::")] += 1
        elif name == "aten::_to_copy" and tuple(args[0].shape) in self.shapes:
            self.found["cast"] += 1
        return function(*args, **(kwargs or {}))


def restored(strategy, folder: Path) -> bool:
    """Whether what the ranks write between them is on all of them again, where there was something else."""
    number = dist.get_rank()
    folder.mkdir(exist_ok=True)
    own = staging.Staging(torch.device("cpu")).fill(strategy.state(), number).write(folder)
    everything: list = [None] * RANKS
    dist.all_gather_object(everything, own)
    before = {name: values.clone() for name, values in whole(strategy).items()}
    for values in whole(strategy).values():
        values.zero_()
    strategy.load(shards.Reader(folder, functools.reduce(shards.join, everything)["tensors"]), STEPS)
    return all(torch.equal(values, before[name]) for name, values in whole(strategy).items())


def whole(strategy) -> dict[str, torch.Tensor]:
    """All that this rank has, which others may have too."""
    return {name: shard.values for some, _ in strategy._checkpoint_parts() for name, shard in some.items()}


def case(config, words: dict, folder: Path) -> dict:
    os.environ["LOCAL_WORLD_SIZE"] = str(words.pop("local", 2))
    memory = words.pop("memory", [1e12] * RANKS)[dist.get_rank()]
    fsdp._memory = lambda *_: memory
    config = replace(config, gradient_accumulation_steps=MICRO, train=replace(config.train, **words))
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=WORDS, **SIZES))
    counted = Counted({tuple(weight.shape) for weight in network.parameters() if weight.dim() > 1})
    strategy = parallel.make(network.train(), config, torch.device("cpu"))
    losses = []
    for step in range(STEPS):
        if step == STEPS - 1:
            counted.__enter__()
        total = torch.zeros(())
        for micro in range(MICRO):
            torch.manual_seed(100 + (step * MICRO + micro) * RANKS + dist.get_rank())
            rows = torch.randint(WORDS, (2, 16))
            with strategy.accumulate(sync=micro == MICRO - 1):
                loss, _ = strategy.losses(Batch(rows, rows, None).to(strategy.device))
                strategy.backward(loss / (2 * 16 * MICRO))
            total += loss.detach()
        norm = strategy.update(1e-2)
        if step == STEPS - 1:
            counted.__exit__(None, None, None)
        dist.all_reduce(total)
        losses.append((total / (2 * 16 * MICRO * RANKS)).item())
    kept = {name: [shard.begin, shard.values.numel(), list(shard.shape)] for name, shard in strategy.state().items()}
    everything: list = [None] * RANKS
    dist.all_gather_object(everything, kept)
    weights = {name: weight.double().sum().item() for name, weight in strategy.weights()}
    whole = [False] * RANKS
    dist.all_gather_object(whole, restored(strategy, folder))
    return {
        "restored": whole,
        "found": counted.found,
        "losses": losses,
        "norm": norm.item(),
        "kept": everything,
        "weights": weights,
    }


def rank(number: int, store: str, cases: list[dict]) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number % 2), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=number, world_size=RANKS)
    collectives._control = dist.group.WORLD  # by which all agree on a layout
    config = read(sys.argv[1])
    sys.stdout = sys.stderr
    for place, words in enumerate(cases):
        found = case(config, words, Path(store).with_name(f"checkpoint-{place}"))
        if number == 0:
            os.write(1, json.dumps(found).encode() + b"\n")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    chosen = [json.loads(line) for line in sys.stdin]
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for number in range(RANKS):
            pids.append(os.fork())
            if not pids[-1]:
                try:
                    rank(number, f"{folder}/store", chosen)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(codes))
