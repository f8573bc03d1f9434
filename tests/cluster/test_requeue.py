"""Jobs that go on by themselves, in one run folder, through Slurm's own queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import until

pytestmark = pytest.mark.cluster


class Queue:
    """Jobs of the cluster's ordinary user."""

    def __init__(self, cluster) -> None:
        self.cluster, self.runs = cluster, cluster.shared / "runs"
        self.job, self.before = "", set(self.runs.glob("[!.]*"))

    def submit(self, *words: str) -> None:
        code, out, err = self.cluster.exec(["sbatch", "--parsable", "--output=/shared/home/again.log", *words])
        assert code == 0, err
        self.job = out.strip()

    def until(self, seen: Callable[[], object]) -> None:
        until(seen, lambda: (self.log(), self.show()))

    def show(self, job: str = "") -> str:
        return self.cluster.exec(["scontrol", "show", "job", "--oneliner", job or self.job]).out

    def log(self) -> str:
        return (self.cluster.shared / "home" / "again.log").read_text()

    def start_now(self, job: str = "") -> None:
        """Slurm would wait two minutes; in its first second a node takes the job for the one that has just ended."""
        self.until(lambda: "JobState=PENDING" in self.show(job))
        assert self.cluster.exec(["scontrol", "update", f"job={job or self.job}", "StartTime=now+4"]).code == 0

    def attempt(self, number: int) -> Path | None:
        return next((run / f"attempt-{number}" for run in set(self.runs.glob("[!.]*")) - self.before), None)

    def trains(self, number: int) -> bool:
        attempt = self.attempt(number)
        file = attempt / "metrics.jsonl" if attempt else None
        return bool(file and file.exists() and '"step"' in file.read_text())

    def result(self, number: int) -> dict[str, object]:
        self.until((self.attempt(number) / "result.json").exists)
        return json.loads((self.attempt(number) / "result.json").read_text())

    def time_is_near(self) -> None:
        assert self.cluster.exec(["scancel", "--batch", "--signal=USR1", self.job]).code == 0


@pytest.fixture
def queue(cluster):
    (cluster.shared / "home" / "again.log").unlink(missing_ok=True)
    queue = Queue(cluster)
    yield queue
    cluster.exec(["scancel", "--user=dray"])
    queue.until(lambda: not cluster.exec(["squeue", "--noheader"]).out.strip())


def losses(attempt: Path) -> dict[int, float]:
    events = map(json.loads, (attempt / "metrics.jsonl").read_text().splitlines())
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


@pytest.mark.slow
def test_it_is_put_back_and_goes_on_where_it_was(queue: Queue, sbatch, short) -> None:
    words = ("slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, "train.steps=200", "max_requeues=1")
    queue.submit(*words)
    queue.until(lambda: queue.trains(1))
    queue.time_is_near()
    first = queue.result(1)
    assert (first["exit_code"], first["next"]) == (
        75,
        {"requeue": True, "spare": False, "exclude": [], "why": "1 of 1"},
    )
    queue.start_now()
    queue.until(lambda: queue.trains(2))
    queue.until(lambda: "JobState=COMPLETED" in queue.show())
    log = queue.log()
    assert f"requeued: job {queue.job} goes on in this run folder; Slurm starts it" in log
    second = queue.result(2)
    assert (second["status"], second["steps"], second["first_step"]) == ("done", 200, first["saved_step"])
    (history,) = second["history"]
    assert (history["attempt"], history["status"], history["requeued"]) == (1, "stopped", True)
    assert f"stopped by SIGUSR1 at {first['at']}" in log  # the log of the first attempt is still there
    assert "done: 200 steps" in log
    both = {**losses(queue.attempt(1)), **losses(queue.attempt(2))}
    assert both == losses(sbatch(*words).attempt)


@pytest.mark.slow
def test_where_slurm_puts_nothing_back_another_job_follows(queue: Queue, short) -> None:
    queue.submit(
        "--no-requeue", "--comment=mine", "slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, "train.steps=5000",
        "max_requeues=1",
    )  # fmt: skip
    queue.until(lambda: queue.trains(1))
    queue.time_is_near()
    first = queue.result(1)
    queue.until(lambda: "follow-on: job " in queue.log())
    assert "not requeued: " in queue.log()
    job = queue.log().rpartition("follow-on: job ")[2].split()[0]
    queue.until(lambda: queue.trains(2))
    shown = queue.show(job)
    assert "NumNodes=2 " in shown
    assert " TimeLimit=01:00:00 " in shown
    queue.job = job
    queue.time_is_near()
    second = queue.result(2)
    assert (second["first_step"], second["next"]["requeue"]) == (first["saved_step"], False)
    queue.until(lambda: "requeue: no; max_requeues = 1 is used up" in queue.log())


@pytest.mark.slow
def test_a_node_that_is_unfit_is_left_out(queue: Queue, cluster) -> None:
    """Whatever ends with 69 there."""
    fails = 'if [[ $SLURMD_NODENAME == n2 && ! -e on ]]; then exit 69; fi; touch "on-$SLURMD_NODENAME"'
    queue.submit(
        "--nodes=1", "--nodelist=n2", "slurm/singlenode.sh", "launcher=python", "max_requeues=2", "--", "bash", "-c",
        fails,
    )  # fmt: skip
    queue.until(lambda: queue.attempt(1) and (queue.attempt(1) / "result.json").exists())
    queue.until(lambda: "ExcNodeList=n2" in queue.show())
    assert "requeue: 1 of 2, without n2" in queue.log()


@pytest.mark.slow
def test_a_run_leaves_a_node_that_is_drained(queue: Queue, cluster) -> None:
    """Slurm starts it on the other node."""
    leaves = """[[ ! -e $DRAY_RUN/left ]] || exit 0
        touch "$DRAY_RUN/left"; trap 'exit 75' USR1; while :; do sleep 0.1; done"""
    queue.submit(
        "--nodes=1", "slurm/singlenode.sh", "launcher=python", "drain=leave", "max_requeues=1", "--", "bash", "-c",
        leaves,
    )  # fmt: skip
    queue.until(lambda: queue.attempt(1) and (queue.attempt(1).parent / "left").exists())
    (node,) = json.loads((queue.attempt(1) / "plan.json").read_text())["world"]["nodes"]
    update = ["scontrol", "update", f"NodeName={node['name']}"]
    try:
        assert cluster.exec([*update, "State=DRAIN", "Reason=a test"], user="root").code == 0
        first = queue.result(1)
        assert (first["status"], first["exit_code"], first["reason"]) == ("stopped", 75, "SIGUSR1")
        assert f"dray: Slurm drains {node['name']} (a test): the run is asked to save and leave" in queue.log()
        queue.start_now()
        queue.until(lambda: "JobState=COMPLETED" in queue.show())
    finally:
        cluster.exec([*update, "State=RESUME"], user="root")
    assert (queue.result(2)["status"], queue.result(2)["hosts"] == first["hosts"]) == ("done", False)


@pytest.mark.slow
def test_a_job_that_is_cancelled_stays_cancelled(queue: Queue, short) -> None:
    queue.submit("slurm/multinode.sh", "recipes/smoke-cpu.toml", *short, "train.steps=5000", "max_requeues=3")
    queue.until(lambda: queue.trains(1))
    assert queue.cluster.exec(["scancel", queue.job]).code == 0
    queue.until(lambda: "JobState=CANCELLED" in queue.show())
    assert queue.result(1)["reason"] == "scancel"
    assert not (queue.attempt(1) / "next").exists()
