"""A training by transformers' Trainer, with an argument for DeepSpeed's file, as its examples have it."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
data = [{"input_ids": (row := torch.arange(16) * (number % 3 + 1) % 64), "labels": row} for number in range(64)]
words = {"deepspeed": sys.argv[1]} if len(sys.argv) > 1 else {}
settings = TrainingArguments(
    output_dir="hf", max_steps=8, per_device_train_batch_size=2, learning_rate=0.01, logging_steps=1, use_cpu=True,
    save_strategy="no", report_to=[], disable_tqdm=True, **words,
)  # fmt: skip
trainer = Trainer(model=model, args=settings, train_dataset=data)
trainer.train()
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    kind = type(trainer.model_wrapped).__name__
    Path("hf.json").write_text(json.dumps({"losses": losses, "world": settings.world_size, "wrapped": kind}))
sys.stdout.flush()
os._exit(0)  # torch's own end aborts one process in eight or so where gloo was not destroyed
