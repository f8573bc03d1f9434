"""The trainer on a stand-in for H100s whose kernels do nothing (tests/standin): nothing raises, and no step waits.

It proves no number that a kernel computes, no time, and no order of streams. torch's own host code, its allocator, DDP,
FSDP2, Inductor, Triton and ptxas are the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.runs import local, write
from helpers import ROOT
from nodes import free_port
from trainings import GPT

sys.path.insert(0, str(ROOT / "tests" / "standin"))
import environment

pytestmark = pytest.mark.torch
LIMIT = 300
RUNS: dict[str, tuple[str, ...]] = {
    "ddp": ("train.strategy=ddp", "train.precision=bf16"),
    "ddp, master weights and their comm hook": ("train.precision=bf16", "train.master_weights=true"),
    "fsdp": ("train.strategy=fsdp", "train.precision=bf16"),
    "hsdp, a copy on each node": ("train.strategy=fsdp", "train.precision=bf16", "train.fsdp_shard=1"),
}


def ranks(folder: Path, words: Sequence[str], *, number: int = 2, nodes: int = 1) -> list[str]:
    """What each rank has printed, once all of them have ended well."""
    python, env = environment.environment(number // nodes)
    given = [f"ranks_per_node={number // nodes}", f"nodes={nodes}", f"data.cache_dir={folder}/tokens", "image=cuda"]
    recipe = write.read_recipe(ROOT / "tests" / "tiny.toml", [*given, *words])
    facts = local.facts(
        recipe, engine="bare", image=sys.executable, nodes=nodes, gpus_per_node=number // nodes, site=""
    )
    write.write(recipe, facts, runs=folder, run="run")
    plan = folder / "run" / "attempt-1" / "plan.json"
    world = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number // nodes), "GLOO_SOCKET_IFNAME": "lo"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(number):
        local_rank, node = rank % (number // nodes), rank // (number // nodes)
        place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "DRAY_NODE_NAME": f"node{node}"}
        argv = [python, str(ROOT / "tests/standin/ranks.py"), str(plan)]
        rank_env = {"PATH": os.environ["PATH"], **env, **world, **place}
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(argv, env=rank_env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    printed = [(folder / f"{rank}.log").read_text() for rank in range(number)]
    assert codes == [0] * number, "\n".join(printed)
    return printed


@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_save_and_wait_for_no_device(name: str, tmp_path: Path) -> None:
    """Collectives of a step, of a checkpoint and of the final save: none raises, and no step waits."""
    nodes = 2 if name.startswith("hsdp") else 1
    words = ["train.steps=6", "train.warmup_steps=1", "batch.per_device=2", "checkpoint.every=3", *GPT, *RUNS[name]]
    ranks(tmp_path, words, number=2 * nodes, nodes=nodes)
    assert list(tmp_path.rglob("model.safetensors"))
