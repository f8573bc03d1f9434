"""A training script written for DeepSpeed."""

import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
settings = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
torch.manual_seed(dist.get_rank())
inputs = torch.randn(16, 8, dtype=torch.bfloat16)
targets = inputs.sum(dim=1, keepdim=True)
losses = []
for _ in range(20):
    loss = torch.nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    shown = loss.detach().float()
    dist.all_reduce(shown)
    losses.append(shown.item() / dist.get_world_size())
if dist.get_rank() == 0:
    Path("zero.json").write_text(
        json.dumps({"losses": losses, "world": dist.get_world_size(), "stage": engine.zero_optimization_stage()})
    )
dist.barrier()
os._exit(0)
