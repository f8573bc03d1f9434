"""`dray study sweep` and `scale` on the real Slurm: an array, one task of it, one that is requeued, and the table."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import until

pytestmark = pytest.mark.cluster


class Studies:
    """At the login node, in a folder of their own."""

    def __init__(self, cluster, login) -> None:
        self.cluster, self.login, self.runs = cluster, login, cluster.shared / "studies"

    def dray(self, *words: str) -> tuple[int, str]:
        code, out, err = self.login.dray(*words, "--runs=/shared/studies")
        return code, out + err

    def slurm(self, *words: str) -> str:
        code, out, err = self.cluster.exec([*words])
        assert code == 0, (words, out, err)
        return out

    def queue(self) -> dict[str, str]:
        lines = self.slurm("squeue", "--array", "--noheader", "--user=dray", "--format=%i %T").splitlines()
        return dict(line.split(" ", 1) for line in lines)

    def until(self, ready: Callable[[], object]) -> None:
        until(ready, lambda: (self.queue(), [path.read_text() for path in self.runs.glob("*/job-*.log")]))

    def trains(self, run: Path, attempt: int) -> bool:
        file = run / f"attempt-{attempt}" / "metrics.jsonl"
        return file.exists() and '"step"' in file.read_text()


@pytest.fixture
def studies(cluster, login) -> Iterator[Studies]:
    made = Studies(cluster, login)
    subprocess.run(["rm", "-rf", "--", str(made.runs)], check=True)  # of a test that was interrupted
    yield made
    cluster.exec(["scancel", "--user=dray"])
    made.until(lambda: not made.queue())
    subprocess.run(["rm", "-rf", "--", str(made.runs)], check=True)


@pytest.mark.slow
def test_one_array_one_task_of_it_and_one_that_is_requeued(studies: Studies, short) -> None:
    lr = "train.lr=1e-3,2e-3,4e-3"
    code, out = studies.dray(
        "study", "sweep", "recipes/smoke-cpu.toml", *short, "train.steps=400", lr,
        "--nodes=1", "--ranks=2", "--sbatch=--exclusive",
    )  # fmt: skip
    assert code == 0, out
    array = re.match(r"job ([0-9]+)_1: train.lr=1e-3\njob \1_2: train.lr=2e-3\njob \1_3: train.lr=4e-3\n", out)
    assert array, out
    ids = [f"{array[1]}_{number}" for number in (1, 2, 3)]
    (study,) = (path.parent for path in studies.runs.glob("*/study.json"))
    runs = [studies.runs / f"{study.name}-{number}" for number in (1, 2, 3)]
    studies.until(lambda: studies.trains(runs[1], 1))

    waits = json.loads(studies.dray("status", ids[2], "--json")[1])
    assert (waits["run"], waits["state"], waits["job_id"]) == (runs[2].name, "queued", ids[2])
    told = studies.dray("stop", ids[2])
    cancelled = f"the job was cancelled: job {ids[2]}, PENDING\nthe run never started\n"
    assert told == (0, f"{cancelled}run folder: /shared/studies/{runs[2].name}\n")
    assert ids[2] not in studies.queue()
    assert ids[1] in studies.queue()
    assert "is an array, and each task is a run" in studies.dray("status", array[1])[1]

    studies.slurm("scontrol", "requeue", ids[1])
    studies.until(lambda: studies.queue().get(ids[1]) == "PENDING")
    waits = json.loads(studies.dray("status", ids[1], "--json")[1])
    assert (waits["run"], waits["state"], waits["waiting"]["id"]) == (runs[1].name, "queued", ids[1])
    studies.slurm("scontrol", "update", f"job={ids[1]}", "StartTime=now+4")
    studies.until((runs[1] / "attempt-2" / "result.json").exists)
    studies.until((runs[0] / "attempt-1" / "result.json").exists)
    studies.until(lambda: not studies.queue())
    plans = [json.loads((run / "plan.json").read_text()) for run in (runs[1] / "attempt-1", runs[1] / "attempt-2")]
    assert [plan["recipe"]["train"]["lr"] for plan in plans] == [2e-3, 2e-3]
    assert f"\ntask={ids[1]}\n" in (runs[1] / "attempt-2" / "facts.txt").read_text()
    assert not (runs[1] / "attempt-3").exists()
    assert (runs[1] / f"job-{ids[1]}.log").read_text().count("run folder: ") >= 2
    code, out = studies.dray("logs", ids[1])
    assert code == 0, out
    assert "step 400/400" in out
    assert studies.dray("why", ids[0])[1].startswith(f"{runs[0].name}, attempt 1: done, nothing failed\n")

    code, out = studies.dray("study", "show", study.name)
    states = [line.split()[1] for line in out.splitlines()[1:4]]
    assert (code, states) == (1, ["done", "done", "stopped"]), out


@pytest.mark.slow
def test_one_task_is_stopped_while_it_runs_and_the_other_goes_on(studies: Studies, short) -> None:
    code, out = studies.dray(
        "study", "sweep", "recipes/smoke-cpu.toml", *short, "train.steps=5000", "train.lr=1e-3,2e-3",
        "--nodes=1", "--ranks=1",
    )  # fmt: skip
    assert code == 0, out
    array = out.partition("_")[0].removeprefix("job ")
    (study,) = (path.parent for path in studies.runs.glob("*/study.json"))
    runs = [studies.runs / f"{study.name}-{number}" for number in (1, 2)]
    studies.until(lambda: all(studies.trains(run, 1) for run in runs))
    # The last task that begins has the array's own number.
    code, out = studies.dray("stop", f"{array}_2")
    assert code == 0, out
    assert "\nstopped by dray stop at " in out
    assert studies.queue().get(f"{array}_1") == "RUNNING"
    assert not (runs[0] / "attempt-1" / "result.json").exists()
    assert json.loads(studies.dray("status", f"{array}_1", "--json")[1])["state"] == "running"
    assert studies.dray("stop", f"{array}_1", "--now")[0] == 0


@pytest.mark.slow
def test_scale_on_one_node_and_on_two(studies: Studies, short) -> None:
    code, out = studies.dray("study", "scale", "recipes/smoke-cpu.toml", *short, "--ranks=2,4", "--per-node=2")
    assert code == 0, out
    assert re.match(r"job [0-9]+: 2 ranks\njob [0-9]+: 4 ranks\n", out), out
    (study,) = (path.parent for path in studies.runs.glob("*/study.json"))
    results = [studies.runs / f"{study.name}-{number}" / "attempt-1" / "result.json" for number in (1, 2)]
    studies.until(lambda: all(path.exists() for path in results))
    code, out = studies.dray("study", "show", study.name)
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["2", "done"], ["4", "done"]], out
    assert (code, "they agree\n" in out) == (0, True), out
