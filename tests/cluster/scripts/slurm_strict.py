"""A script for srun: it knows Slurm's variables and nothing else, and needs each of them."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
local, node = int(os.environ["SLURM_LOCALID"]), int(os.environ["SLURM_NODEID"])
dist.init_process_group("gloo", rank=rank, world_size=size)
total = torch.tensor([float(rank)])
dist.all_reduce(total)
names = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NPROCS")
seen = {"rank": rank, "local": local, "node": node, "sum": int(total), **{name: os.environ[name] for name in names}}
Path(f"strict-{rank}.json").write_text(json.dumps(seen))
dist.destroy_process_group()
