"""A job that Slurm tells that its time comes to an end: it saves, ends with 75, and goes on in its own run folder."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import until

pytestmark = pytest.mark.cluster


def stepping(folder: Path, before: set[Path]) -> bool:
    files = [run / "attempt-1" / "metrics.jsonl" for run in set(folder.iterdir()) - before]
    return any('"step"' in file.read_text() for file in files if file.exists())


@pytest.mark.slow
def test_it_saves_and_goes_on(sbatch, cluster, short) -> None:
    """scancel --batch tells it as sbatch --signal=B: does; the image stays mounted until the ranks have saved."""
    runs, words = cluster.shared / "runs", ("slurm/multinode.sh", "recipes/smoke-cpu.toml", *short)
    before = set(runs.iterdir())
    with ThreadPoolExecutor() as pool:
        job = pool.submit(sbatch, *words, "train.steps=5000")
        until(lambda: stepping(runs, before))
        asked = time.monotonic()
        assert cluster.exec(["scancel", "--batch", "--signal=USR1", "--user=dray"]).code == 0
        ended = job.result()
    assert (ended.code, time.monotonic() - asked < 20) == (75, True), ended.output
    result = ended.result()
    step = result["steps"]
    assert (result["status"], result["exit_code"], result["reason"]) == ("stopped", 75, "SIGUSR1")
    assert result["checkpoint"].endswith(f"/checkpoints/step-{step}")
    assert (
        f"stopped by SIGUSR1 at {result['at']}, after step {step}\n  safe:   all up to step {step}, in " in ended.output
    )
    causes = [json.loads(file.read_text()) for file in (ended.attempt / "failures").iterdir()]
    assert {(cause["code"], cause["why"]) for cause in causes} == {(75, "it was asked to save and end")}
    again = sbatch(words[0], f"--run={ended.folder.name}", f"train.steps={step + 2}")  # the rest is in its plan
    assert again.code == 0, again.output
    assert f"resumes {ended.folder.name} by the plan of attempt 1: recipe smoke-cpu" in again.output
    assert (again.folder, again.attempt.name) == (ended.folder, "attempt-2")
    assert again.metrics("start")[0]["first_step"] == step
