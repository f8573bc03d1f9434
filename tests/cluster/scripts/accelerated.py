"""A training script written for accelerate."""

import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = torch.nn.Linear(8, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(data, batch_size=16)
)
losses = []
for batch, targets in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch), targets)
    accelerator.backward(loss)
    optimizer.step()
    losses.append(accelerator.gather(loss.detach()).mean().item())
if accelerator.is_main_process:
    kind = str(accelerator.distributed_type)
    Path("accelerated.json").write_text(
        json.dumps({"losses": losses, "world": accelerator.num_processes, "kind": kind})
    )
accelerator.wait_for_everyone()
os._exit(0)
