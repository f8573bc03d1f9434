"""A job on the real cluster in which something goes wrong, followed through restarts and requeues to its end."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from helpers import ROOT

STEPS, EVERY = 60, 5
RECIPE = (
    "recipes/smoke-cpu.toml", "ranks_per_node=1", "preflight.when=never", f"train.steps={STEPS}",
    "train.warmup_steps=2",
    "train.log_every=1", "model.config.n_layer=2", "data.max_eval_samples=8", f"checkpoint.every={EVERY}",
    "checkpoint.keep=3", "max_restarts=2", "max_requeues=2",
)  # fmt: skip
ENDED = ("CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
_QUEUE = threading.Lock()  # job numbers and run folders come one by one


class Running:
    """One job, by its number, and the folder of its run on this machine."""

    recipe: tuple[str, ...] = RECIPE
    folder: str | None = None
    """Where it is submitted from; else the checkout."""

    def __init__(self, cluster: Any, seed: int, *words: str) -> None:
        self.cluster, self.seed, self.rng = cluster, seed, random.Random(seed)
        self.log = cluster.shared / "home" / f"fault-{seed}-{time.time_ns()}.log"
        self.words = self.typed(words)
        self.jobs: list[str] = []
        self.run = Path()
        self.injected = 0.0

    def typed(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """After slurm/multinode.sh, its own options first."""
        return (
            *(word for word in words if word[:2] == "--"),
            *self.recipe,
            *(word for word in words if word[:2] != "--"),
        )

    # What a user does.

    def submit(self, *options: str, run: str = "") -> None:
        given = [f"--run={run}"] if run else []
        words = [*options, f"{ROOT}/slurm/multinode.sh", *given, *self.words]
        with _QUEUE:
            code, out, err = self.cluster.exec(
                ["sbatch", "--parsable", f"--output=/shared/home/{self.log.name}", "--open-mode=append", *words],
                workdir=self.folder,
            )
            assert code == 0, err
            self.jobs.append(out.strip())
            if not run:
                self.until(lambda: re.search(r"^run folder: /shared/(.*)$", self.output(), re.MULTILINE), 60)
                found = re.search(r"^run folder: /shared/(.*)$", self.output(), re.MULTILINE)
                self.run = self.cluster.shared / found[1]

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def until(self, seen: Callable[[], object], limit: float = 90) -> None:
        """Until it is seen, if the job goes on to print; what it printed where it does not."""
        check = self.speaking(limit)
        while not seen():
            check()
            time.sleep(0.05)

    def speaking(self, limit: float) -> Callable[[], None]:
        """Fails when the job has printed nothing for so many seconds: a slow machine still prints, a hang does not."""
        size, deadline = -1, 0.0

        def check() -> None:
            nonlocal size, deadline
            now = self.log.stat().st_size if self.log.exists() else 0
            if now != size:
                size, deadline = now, time.monotonic() + limit
            assert time.monotonic() < deadline, f"{self}\n{self.output()[-3000:]}\n{self.show()}"

        return check

    def show(self) -> str:
        return self.cluster.exec(["scontrol", "show", "job", "--oneliner", self.jobs[-1]]).out

    def on(self, node: str, command: str, *, user: str = "root") -> str:
        """What a command in bash prints on a node; it must end well."""
        code, out, err = self.cluster.exec(["bash", "-c", command], node=node, user=user)
        assert code == 0, (node, command, out, err)
        return out

    # What the run's own files say.

    @property
    def name(self) -> str:
        return self.run.name

    def attempts(self) -> list[Path]:
        found = [path for path in self.run.glob("attempt-*") if path.name[8:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[8:]))

    def events(self, kind: str = "step") -> Iterator[dict[str, Any]]:
        for file in self.metrics():
            for line in file.read_text().splitlines() if file.exists() else ():
                if line.endswith("}") and (event := json.loads(line))["event"] == kind:
                    yield event

    def metrics(self) -> list[Path]:
        """Of its attempts, in their order."""
        return [attempt / "metrics.jsonl" for attempt in self.attempts()]

    def step(self) -> int:
        return max((event["step"] for event in self.events()), default=0)

    def result(self, attempt: int = -1) -> dict[str, Any]:
        file = self.attempts()[attempt] / "result.json"
        self.until(file.exists, 60)
        return json.loads(file.read_text())

    # What goes wrong.

    def at_some_step(self, least: int = EVERY + 2, most: int = STEPS - 15) -> None:
        """Training is at a step that the seed has chosen, past its first checkpoint."""
        wanted = self.rng.randint(least, most)
        self.until(lambda: self.step() >= wanted)

    def kill(self, node: str, pattern: str, signal: str = "KILL") -> None:
        """Processes of this run by their whole command line; at least one."""
        self.injected = time.time()
        self.on(node, f"pkill -{signal} -f -- {shlex.quote(pattern.replace('RUN', re.escape(self.name)))}")

    # To its end.

    def follow(self, limit: float = 150) -> None:
        """Until no job of the run is left; Slurm's two minutes before a requeued one starts are cut short."""
        check = self.speaking(limit)
        hurried: set[str] = set()
        while True:
            check()
            follow = re.findall(r"^follow-on: job (\d+)", self.output(), re.MULTILINE)
            if follow and follow[-1] not in self.jobs:
                self.jobs.append(follow[-1])
            shown = self.show()
            if not (found := re.search(r"JobState=(\S+) .*Restarts=(\d+)", shown)):
                continue  # a controller that does not answer
            state, restarts = found.groups()
            if state == "PENDING" and "Reason=BeginTime" in shown and restarts not in hurried:
                # In its first seconds a node takes the job for the one that has just ended.
                self.cluster.exec(["scontrol", "update", f"job={self.jobs[-1]}", "StartTime=now+3"])
                hurried.add(restarts)
            # It may be PREEMPTED or CANCELLED for a moment before it is back in the queue.
            _, requeued, after = self.output().rpartition("\nrequeued: ")
            ended = state in ENDED and not (requeued and "\nrun folder: " not in after)
            if ended and "not requeued" in self.output() and not follow:
                return
            if ended and (not follow or follow[-1] == self.jobs[-1]):
                return
            time.sleep(0.2)

    def losses(self, close: float = 0.0) -> dict[int, float]:
        """Of each step; one that was taken twice had the same loss both times."""
        found: dict[int, float] = {}
        for event in self.events():
            step, loss = event["step"], event["loss"]
            before = found.setdefault(step, loss)
            assert math.isclose(before, loss, rel_tol=close), f"step {step} again: {before!r}, then {loss!r}"
        return found

    def weights(self) -> str:
        """A digest of the model that it left."""
        return hashlib.sha256((self.run / "checkpoints" / "final" / "model.safetensors").read_bytes()).hexdigest()

    def next_step_after(self, time_: float) -> float | None:
        """Seconds until the first step of a new start."""
        starts = [event["time"] for event in self.events("start") if event["time"] > time_]
        steps = [event["time"] for event in self.events() if starts and event["time"] >= starts[0]]
        return steps[0] - time_ if steps else None

    def lost(self) -> int:
        """Steps that were taken twice."""
        steps = [event["step"] for event in self.events()]
        return len(steps) - len(set(steps))

    def named(self) -> str:
        """All causes that the results of its attempts name."""
        said = []
        for number in range(len(self.attempts())):
            result = self.result(number)
            for cause in (result["restart_cause"], result["cause"]):
                if cause:
                    who = "the launch" if cause["rank"] is None else f"rank {cause['rank']}"
                    why = cause["why"].splitlines()[0][:160]
                    said.append(f"{who} on {cause['node']}: {why} ({cause['name']})")
            if result.get("reason"):
                said.append(f"stopped by {result['reason']}")
        return "; ".join(said)

    def __str__(self) -> str:
        return f"seed {self.seed}, job {' '.join(self.jobs)}, {self.run}"


class Plain(Running):
    """A job of plain.py, in a folder of its own."""

    recipe = ("launcher=python", "ranks_per_node=1", "preflight.when=never", "max_restarts=2", "max_requeues=2")

    def __init__(self, cluster: Any, seed: int, *words: str) -> None:
        super().__init__(cluster, seed, *words)
        self.folder = f"/shared/home/{self.log.stem}"
        self.own = self.log.with_suffix("")
        made = cluster.exec(["install", "-D", "-t", self.folder, f"{ROOT}/tests/faults/plain.py"])
        assert made.code == 0, made.err

    def typed(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return (*super().typed(words), "--", "python3", "plain.py", str(self.seed))

    def metrics(self) -> list[Path]:
        return [self.own / "metrics.jsonl"]

    def weights(self) -> str:
        model = torch.load(self.own / "saved.pt", weights_only=True)["model"]
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.values())).hexdigest()


@contextmanager
def going(
    cluster: Any, seed: int, *words: str, options: tuple[str, ...] = (), kind: type[Running] = Running
) -> Iterator[Running]:
    """A job that has begun to train; nothing of it is left in the queue at the end."""
    running = kind(cluster, seed, *words)
    try:
        running.submit(*options)
        yield running
    finally:
        for job in running.jobs:
            cluster.exec(["scancel", job])
