"""dray's trainer hangs, or is slow, in real runs of `dray run`; what is only long is no hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakSet

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.contract import heartbeat as contract  # noqa: E402
from dray.train.runtime import heartbeat, slow  # noqa: E402
from dray.train.runtime.heartbeat import Heartbeat  # noqa: E402
from helpers import PYTHON, ROOT  # noqa: E402
from trainings import GPT  # noqa: E402

pytestmark = pytest.mark.torch

# In each rank's Python: does to the trainer what `FAULT` says.
PLANTED = """
import os, sys, threading, time


def spins():
    while True:
        pass


def plant(fault, rank):
    while not hasattr(sys.modules["__main__"], "_start"):  # its last function: all is imported
        time.sleep(0.01)
    import torch.distributed as dist
    from dray.train.checkpoint.checkpoints import Checkpoints
    from dray.train.loop.evaluate import Evaluator
    from dray.train.loop.loop import Loop
    from dray.train.parallel.ddp import Ddp
    take, save, batch, losses = Loop._step, Checkpoints.save, Evaluator._batch, Ddp.losses

    def step(self, number, *rest):
        if fault == "long" and number == 0:
            time.sleep(4)
        if rank == 1 and number == 5:
            if fault == "spin":
                spins()
            if fault == "collective":
                dist.barrier()
        return take(self, number, *rest)

    def saved(self, *given):
        time.sleep(4)
        save(self, *given)

    def evaluated(self, *given):
        time.sleep(3)
        return batch(self, *given)

    def forward(self, given):
        began = time.perf_counter()
        found = losses(self, given)
        time.sleep(0.01 + (rank == 1) * (0.005 + (time.perf_counter() - began) / 2))
        return found

    Loop._step = step
    if fault == "long":
        Checkpoints.save, Evaluator._batch = saved, evaluated
    if fault == "slow":
        Ddp.losses = forward


if os.environ.get("RANK") and os.environ.get("DRAY_HEARTBEAT"):
    threading.Thread(target=plant, args=(os.environ["FAULT"], int(os.environ["RANK"])), daemon=True).start()
"""


class Ran:
    """A run of tests/tiny.toml."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self.output = ""

    @property
    def attempt(self) -> Path:
        return self.folder / "runs" / "it" / "attempt-1"

    def result(self) -> dict[str, Any]:
        return json.loads((self.attempt / "result.json").read_text())

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.attempt / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for line in lines if (event := json.loads(line))["event"] == kind]

    def until_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while not any(event["step"] >= step for event in self.events("step")):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def program(self, rank: int) -> int:
        """The process id of a rank's program."""
        plan = json.loads((self.attempt / "plan.json").read_text())
        beat = Path(contract.path(plan["scratch"], rank)).read_bytes()
        return int(contract.PROGRAM.unpack_from(beat)[0])

    def end(self) -> int:
        self.output = self.process.communicate(timeout=90)[0]
        return self.process.returncode


@pytest.fixture
def training(tmp_path: Path):
    """Two nodes of one rank, or what the options say."""

    @contextmanager
    def begun(fault: str, *settings: str, options: tuple[str, ...] = ("--nodes", "2", "--ranks", "1")) -> Iterator[Ran]:
        site = tmp_path / "planted here"
        site.mkdir()
        (site / "sitecustomize.py").write_text(PLANTED)
        given = [*GPT, f"env.PYTHONPATH={site}", f"env.FAULT={fault}", f"data.cache_dir={tmp_path}/tokens", *settings]
        argv = [sys.executable, "-m", "dray", "run", str(ROOT / "tests" / "tiny.toml"), *options]
        argv += ["--runs", str(tmp_path / "runs"), "--run", "it", "preflight.when=never", *given]
        with subprocess.Popen(
            argv,
            env={**PYTHON, "HOME": str(tmp_path), "DRAY_HOME": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                yield Ran(tmp_path, process)
            finally:
                process.terminate()

    return begun


LIMIT = 4
STEPS = ("batch.per_device=4", "train.steps=100000", f"hang_timeout_s={LIMIT}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param("spin", marks=pytest.mark.slow), "collective", pytest.param("stop", marks=pytest.mark.slow)]
)
def test_the_rank_that_holds_up_the_others_is_named(training, fault: str) -> None:
    with training(fault, *STEPS, f"launcher={'torchrun' if fault == 'stop' else 'python'}") as run:
        run.until_step(5)
        began = time.monotonic()
        if fault == "stop":
            os.kill(run.program(1), signal.SIGSTOP)
        assert run.end() == 75, run.output
    seconds = time.monotonic() - began
    cause = run.result()["cause"]
    assert seconds < LIMIT + 10
    assert (cause["rank"], cause["node"], cause["code"]) == (1, "node2", 75), cause
    assert cause["why"].startswith("hang: rank 1 on node2 "), cause
    stack = (run.attempt / "hang" / "rank-1.txt").read_text()
    other = (run.attempt / "hang" / "rank-0.txt").read_text()
    if fault == "spin":
        assert " and others all_reduce, collective " in cause["why"]
        assert "spins (" in cause["why"]
        assert "in spins" in stack
    if fault == "collective":
        assert "has last entered barrier, collective " in cause["why"]
        assert "in barrier" in stack
    if fault == "stop":
        assert "is stopped (SIGSTOP): at step " in cause["why"]
    assert "dray/train/loop/loop.py" in stack
    assert "== fr_trace_json" in other, other
    assert "failed: rank 1 on node2: hang: " in run.output


@pytest.mark.slow
def test_what_is_long_is_no_hang(training) -> None:
    """The first step, a checkpoint, an evaluation: each is longer than the limit of a step."""
    settings = ("train.steps=6", "hang_timeout_s=2", "checkpoint.every=3", "train.eval_every=4")
    with training("long", "batch.per_device=4", "data.max_eval_samples=8", *settings) as run:
        assert run.end() == 0, run.output
    assert not (run.attempt / "hang").exists()


@pytest.mark.slow
def test_a_rank_slower_by_half_is_named_once(training) -> None:
    settings = ("batch.per_device=4", "train.steps=800", "train.log_every=5")
    with training("slow", *settings) as run:
        assert run.end() == 0, run.output
    (event,) = run.events("slow")
    assert (event["rank"], event["node"]) == (1, "node2")
    assert 1.25 < event["times"] < 2
    assert (
        "rank 1 on node2 is slow: its data and forward pass take" in (run.attempt / "logs" / "rank-0.log").read_text()
    )
    assert f"slow: rank 1 on node2, {event['times']:.2f} times the median rank" in run.output


# How long each phase may take.


def at(beating: Heartbeat, monkeypatch: pytest.MonkeyPatch, *moments: float) -> None:
    """A beat after each of these seconds."""
    for seconds in moments:
        now = beating._last + int(seconds * 1e9)
        with monkeypatch.context() as patched:
            patched.setattr(heartbeat.time, "monotonic_ns", lambda now=now: now)
            beating.beat()


@pytest.mark.parametrize(
    ("compiled", "steps", "given", "limit"),
    [
        (3, (1, 2), None, 600),
        (3, (20, 90, 1), None, 900),
        (900, (1,), None, 1800),  # a step may compile once more
        (900, (100,), 7, 7),
        (1, (1,), 900, 900),
    ],
)
def test_a_step_s_limit_follows_the_run_s_own(
    monkeypatch: pytest.MonkeyPatch, compiled: float, steps: tuple[float, ...], given: int | None, limit: int
) -> None:
    beating = Heartbeat()
    beating.begin(given)
    beating._phase = contract.COMPILE
    at(beating, monkeypatch, compiled)
    beating._phase = contract.STEP
    at(beating, monkeypatch, *steps)
    assert beating.limit() == limit


def test_a_checkpoint_s_limit_is_ten_times_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Heartbeat()
    beating.begin(None)
    beating._phase = contract.CHECKPOINT
    assert beating.limit() == 1800
    at(beating, monkeypatch, 400)
    assert beating.limit() == 4000


def test_a_heartbeat_that_cannot_be_written_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "gone", tmp_path, tmp_path / "short"):
        (tmp_path / "short").write_bytes(b"1")
        monkeypatch.setenv(contract.VARIABLE, str(path))
        Heartbeat().begin(None)
        assert "this rank has no heartbeat: " in capsys.readouterr().out


class Told:
    """The metrics' file."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: str, shown: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})


def of_four(monkeypatch: pytest.MonkeyPatch, told: Told) -> slow.Slow:
    """Four ranks on two nodes."""
    monkeypatch.setenv("NODE", "n1")
    monkeypatch.setattr(slow, "all_gather_json", lambda _: ["n1", "n1", "n2", "n2"])
    monkeypatch.setattr(slow.ranks, "world", lambda: 4)
    config: Any = SimpleNamespace(train=SimpleNamespace(strategy="ddp"), host_variable="NODE")
    return slow.Slow(config, torch.device("cpu"), told)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("windows", "named"),
    [
        ([[1.0, 1.0, 1.0, 1.6]] * 9, [(3, 1.6)]),
        ([[1.0, 1.6, 1.0, 1.6]] * 9, [(1, 1.6), (3, 1.6)]),
        ([[1.0, 1.0, 1.0, 1.2]] * 9, []),
        (([[1.0, 1.0, 1.0, 1.6]] * 4 + [[1.0] * 4]) * 3, []),  # not steadily
        ([[0.01, 0.01, 0.01, 0.016]] * 49, []),  # too short to tell
        ([[0.0] * 4] * 9, []),
    ],
)
def test_who_is_steadily_slower(
    monkeypatch: pytest.MonkeyPatch, windows: list[list[float]], named: list[tuple[int, float]]
) -> None:
    told = Told()
    ranks = of_four(monkeypatch, told)
    for step, window in enumerate(windows):
        ranks.observe(window, step)
    assert [(event["rank"], event["times"]) for event in told.events] == named


class Event:
    """An event of a GPU that is two forward passes behind the host; each pass takes a second."""

    alive: ClassVar = WeakSet["Event"]()
    clock = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.alive.add(self)

    def record(self) -> None:
        self.at = Event.clock = Event.clock + 1

    def query(self) -> bool:
        return self.at <= Event.clock - 4

    def elapsed_time(self, _end: Event) -> float:
        return 1000.0


def test_a_run_that_logs_rarely_keeps_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's forward passes are added as it finishes them, and none is lost."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    ranks = of_four(monkeypatch, Told())
    ranks._device = torch.device("cuda")
    for _ in range(100):
        with ranks.forward():
            pass
    assert len(Event.alive) <= 8
    Event.clock += 4
    ranks.observe([1.0] * 4, 1)
    ranks._device = torch.device("cpu")
    assert ranks.own_seconds().tolist() == [100.0, 0.0, 0.0, 0.0]


def test_each_node_s_own_seconds_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its slowest rank; not of the first line, which has no steps before it, nor after a run went back."""
    ranks = of_four(monkeypatch, Told())
    own = [1.0, 2.0, 3.0, 2.5]
    found = []
    for step in (41, 50, 60, 45, 50):
        found.append(ranks.nodes(own))
        ranks.observe(own, step)
    assert found == [[], [], [round(2 / 9, 6), round(3 / 9, 6)], [0.2, 0.3], []]
