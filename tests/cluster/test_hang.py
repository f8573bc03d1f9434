"""Runs that hang on the real cluster: accelerate's own script, and a rank of dray's trainer that is stopped."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from following import RECIPE, new
from helpers import until

pytestmark = pytest.mark.cluster

LIMIT = 20


@pytest.mark.slow
def test_accelerate_s_own_script_that_hangs(sbatch, root: Path) -> None:
    """Its two ranks wait for ever in "Test joining uneven inputs", each in another collective."""
    ended = sbatch(
        f"{root}/slurm/multinode.sh", "preflight.when=never", "launcher=accelerate", "ranks_per_node=1",
        f"hang_timeout_s={LIMIT}", "--", "python3", "-m", "accelerate.test_utils.scripts.test_distributed_data_loop",
        workdir="/shared/home",
    )  # fmt: skip
    assert ended.code == 75, ended.output
    cause = ended.result()["cause"]
    assert cause["why"].startswith(f"hang: rank {cause['rank']} on {cause['node']} "), cause
    assert f"(limit {LIMIT} s)" in cause["why"]
    stacks = [(ended.attempt / "hang" / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert all("test_distributed_data_loop.py" in stack for stack in stacks), stacks
    assert any(
        f"in {name}\n" in stack for stack in stacks for name in ("all_reduce", "barrier", "_engine_run_backward")
    )
    assert "Test joining uneven inputs" in (ended.attempt / "logs" / "rank-0.log").read_text()


@pytest.mark.slow
def test_a_rank_that_is_stopped(sbatch, cluster) -> None:
    before = set((cluster.shared / "runs").glob("[!.]*"))
    with ThreadPoolExecutor() as pool:
        job = pool.submit(sbatch, *RECIPE, "train.steps=5000", "train.log_every=1", f"hang_timeout_s={LIMIT}")
        until(lambda: any('"step": 3,' in path.read_text() for path in new(cluster, before, "metrics.jsonl")))
        code, out, err = cluster.exec(["pkill", "-STOP", "--oldest", "-f", "^python3 -m dray.train"], node="n2")
        assert code == 0, out + err
        began = time.monotonic()
        ended = job.result()
    assert time.monotonic() - began < LIMIT + 20  # the batch script ends a few seconds after the nodes
    assert ended.code == 75, ended.output
    cause = ended.result()["cause"]
    assert cause["why"].startswith("hang: rank 1 on n2 is stopped (SIGSTOP): at step "), cause
    assert "loop.py" in (ended.attempt / "hang" / "rank-1.txt").read_text()
