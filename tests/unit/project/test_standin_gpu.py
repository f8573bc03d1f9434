"""The trainer on a stand-in for H100s whose kernels do nothing (tests/standin): nothing raises, and no step waits.

It proves no number that a kernel computes, no time, and no order of streams. torch's own host code, its allocator, DDP,
FSDP2, Inductor, Triton and ptxas are the real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.runs import local, prepare
from helpers import ROOT
from nodes import free_port
from trainings import GPT

sys.path.insert(0, str(ROOT / "tests" / "standin"))
import environment

pytestmark = pytest.mark.torch
LIMIT = 300
RUNS: dict[str, tuple[str, ...]] = {
    "ddp": ("train.strategy=ddp", "train.precision=bf16"),
    "fsdp": ("train.strategy=fsdp", "train.precision=bf16"),
    "hsdp, a copy on each node": ("train.strategy=fsdp", "train.precision=bf16", "train.fsdp_shard=1"),
}


def ranks(folder: Path, words: Sequence[str], *, number: int = 2, nodes: int = 1) -> list[str]:
    """What each rank has printed, once all of them have ended well."""
    python, env = environment.environment(number // nodes)
    given = [f"ranks_per_node={number // nodes}", f"nodes={nodes}", f"data.cache_dir={folder}/tokens", "image=cuda"]
    recipe = prepare.read_recipe(ROOT / "tests" / "tiny.toml", [*given, *words])
    facts = local.facts(
        recipe, engine="bare", image=sys.executable, nodes=nodes, gpus_per_node=number // nodes, site=""
    )
    prepare.write(recipe, facts, runs=folder, run="run")
    plan = folder / "run" / "attempt-1" / "plan.json"
    world = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number // nodes), "GLOO_SOCKET_IFNAME": "lo"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(number):
        local_rank, node = rank % (number // nodes), rank // (number // nodes)
        place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "DRAY_NODE_NAME": f"node{node}"}
        argv = [python, str(ROOT / "tests/standin/launch.py"), str(plan)]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_save_and_wait_for_no_device(name: str, tmp_path: Path) -> None:
    """Collectives of a step, of a checkpoint and of the final save: none raises, and no step waits."""
    nodes = 2 if name.startswith("hsdp") else 1
    words = ["train.steps=6", "train.warmup_steps=1", "batch.per_device=2", "checkpoint.every=3", *GPT, *RUNS[name]]
    ranks(tmp_path, words, number=2 * nodes, nodes=nodes)
    assert list(tmp_path.rglob("model.safetensors"))


VERDICTS = ("ok", "below its aim", "failed", "left out", "no time", "no aim")
# Parts that judge numbers which kernels compute, kernels' names, which come from CUPTI, or time.
COMPUTED = {"checks", "preflight", "attention", "fp16"}
TIMED = {"gpt2", "handwritten", "stock", "llama", "checkpoint"}
LACKS = {"zero1, fp32", "zero2, fp32", "zero3, fp32", "aihwkit-lightning"}


@pytest.mark.slow
def test_the_whole_gpu_suite_runs(tmp_path: Path) -> None:
    """Its CUDA code raises nothing, no step waits, and two ranks share a GPU: a real one is not met with an error."""
    python, env = environment.environment()
    argv = [python, str(ROOT / "benchmarks/gpu"), "--two", "--minutes", "30", "--results", str(tmp_path / "results")]
    env |= {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    page = (tmp_path / "results/page.md").read_text()
    rows = [json.loads(line) for line in (tmp_path / "results/figures.jsonl").read_text().splitlines()]
    verdicts = {verdict: [row for row in rows if row["verdict"] == verdict] for verdict in VERDICTS}
    assert [row for row in rows if row["verdict"] in ("failed", "no time")] == [], done.stdout + done.stderr
    assert {row["what"] for row in verdicts["left out"]} == LACKS, page
    assert {row["part"] for row in verdicts["below its aim"]} <= COMPUTED | TIMED, page
    assert {row["part"] for row in verdicts["ok"]} >= {"syncs", "memory", "two", "strategies", "losses", "documents"}
    assert {row["part"] for row in rows} >= {"machine", "gpt2", "handwritten", "stock", "llama", "fsdp"}
    # What decides a step's memory is the allocator's, which is real: within a tenth of what the planner expects.
    for row in rows:
        if row["part"] == "memory":
            assert row["figures"]["gb"] == pytest.approx(row["figures"]["estimated_gb"], rel=0.1), page
