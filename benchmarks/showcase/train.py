"""A small GPT on the bytes of input.txt, or of this file, as torchrun starts it: `train.py STEPS`.

It resumes from ckpt.pt, and saves on SIGUSR1.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY, LOG_EVERY = int(sys.argv[1]), 20, 10
BATCH, LENGTH, WIDTH, LAYERS, HEADS = 16, 64, 128, 2, 4


class GPT(nn.Module):
    """Bytes in, the next bytes out."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x):
        """The logits of each place."""
        x = self.bytes(x) + self.places.weight
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


asked = False


def ask(*_):
    """Save after this step."""
    global asked
    asked = True


signal.signal(signal.SIGUSR1, ask)
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
text = open("input.txt" if os.path.exists("input.txt") else __file__, "rb").read()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
torch.manual_seed(0)
model = DistributedDataParallel(GPT().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0
if os.path.exists("ckpt.pt"):
    saved = torch.load("ckpt.pt", map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]

since, done = time.perf_counter(), step
while step < STEPS:
    step += 1
    places = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([data[place : place + LENGTH + 1] for place in places[rank::world]]).to(device)
    loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % LOG_EVERY == 0:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        speed = BATCH * LENGTH * (step - done) / (time.perf_counter() - since)
        since, done = time.perf_counter(), step
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.4f} tokens/s {speed:.0f}", flush=True)
    told = torch.tensor(float(asked), device=device)
    dist.all_reduce(told)
    if step % SAVE_EVERY == 0 or step == STEPS or told:
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, "ckpt.part")
            os.replace("ckpt.part", "ckpt.pt")
        dist.barrier()
    if told:
        sys.exit(75)
dist.destroy_process_group()
