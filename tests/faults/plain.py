"""A training script as users write them: DDP, a checkpoint every ten steps and on SIGUSR1, then exit code 75.

It knows nothing of dray. It writes to the folder that it is started in.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 60, 10
SPIN = Path("spin")  # a rank that finds its number in it never comes back from Python
asked = False


def ask(*_: object) -> None:
    """Save after this step."""
    global asked  # noqa: PLW0603  the least that a user would write
    asked = True


def note(**line: object) -> None:
    """As metrics.jsonl has it, for the one who compares."""
    if dist.get_rank() == 0:
        with Path("metrics.jsonl").open("a") as log:
            log.write(json.dumps({"time": time.time(), **line}) + "\n")


signal.signal(signal.SIGUSR1, ask)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
step, saved = 0, Path("saved.pt")
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
note(event="start", first_step=step)
while step < STEPS:
    step += 1
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    loss = (model(data) - data.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    told = torch.tensor([loss.item(), asked])
    dist.all_reduce(told)
    note(event="step", step=step, loss=told[0].item())
    time.sleep(0.1)
    if SPIN.exists() and SPIN.read_text() == os.environ["RANK"]:
        SPIN.unlink()
        while True:
            pass
    if step % EVERY == 0 or told[1] or step == STEPS:
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "part.pt")
            Path("part.pt").rename(saved)
        dist.barrier()
    if told[1]:
        dist.destroy_process_group()
        sys.exit(75)
dist.destroy_process_group()
