"""Train a few steps under ZeRO in an image, and say which operators that took and what was compiled for it.

torchrun --nproc-per-node 2 zero.py zero2|zero3|zero3-offload|zero3-nvme
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

STEPS = 6


def zero(case: str, folder: str) -> dict[str, Any]:
    stage, _, offload = case.removeprefix("zero").partition("-")
    config: dict[str, Any] = {"stage": int(stage)}
    if offload:
        device = {"device": "nvme" if offload == "nvme" else "cpu", "nvme_path": folder}
        config |= {"offload_param": device, "offload_optimizer": device, "sub_group_size": 10_000}
    return {
        "zero_optimization": config,
        # Not torch's AdamW: DeepSpeed's own, which it compiles where no compiled one is found.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 4,
        "aio": {"use_gds": False},
    }


def train(case: str, folder: str) -> list[float]:
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32))
    # One sentence, again and again: the loss must fall.
    words = torch.randint(64, (32,))
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=True,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=zero(case, folder),
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": words, "labels": words}] * 64)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as compiled:
        os.environ["TORCH_EXTENSIONS_DIR"] = compiled
        losses = train(sys.argv[1], folder)
        seen = {
            "case": sys.argv[1],
            "world": torch.distributed.get_world_size(),
            "losses": losses,
            "operators": sorted(OpBuilder._loaded_ops),
            "compiled": sorted(path.name for path in Path(compiled).rglob("*")),
        }
        if torch.distributed.get_rank() == 0:
            print(json.dumps(seen), flush=True)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
