"""Faults injected into jobs on the real cluster: each goes on by itself, with the losses of an undisturbed run.

`make faults` runs the soak: each fault under each strategy, with seeds that it prints, and one table at the end.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from injections import FAULTS, LONG, OF_PLAIN, WITH_SPARE, Fault
from running import Plain, Running, going

pytestmark = pytest.mark.cluster

SEED = int(os.environ.get("DRAY_FAULTS_SEED", "1"))
SOAK = "DRAY_FAULTS" in os.environ
NODES = int(os.environ.get("NODES", "2"))
STRATEGIES = {
    "ddp": (),
    "fsdp": ("train.strategy=fsdp",),
    "zero3": ("train.strategy=zero3",),
    "plain.py": (),
    "300 steps": ("train.steps=300",),
}
PLAIN = "plain.py"
# What CI runs: the first always, the others when their day comes; `make faults` has all.
ALWAYS = ("kill -9 of a rank",)
CI = (*ALWAYS, "a checkpoint's file is flipped", "kill -9 of a node's runner", "kill -9 in the middle of a save",
      "the time limit is near", "a rank is stopped (SIGSTOP)")  # fmt: skip
# These touch the whole cluster: alone, after the others.
ALONE = ("a node is switched off, with a spare node", "a node is switched off, and fewer go on",
         "the controller is restarted", "a node stands still for 10 s", "a node is switched off",
         "a node's network is cut and healed", "preemption by a partition of higher priority",
         "a node's network is slow", "a node's /tmp is full",
         "the image's file is replaced", "the disk of the checkpoints is full")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One fault in one run."""

    fault: Fault
    strategy: str
    seed: int

    def __str__(self) -> str:
        return f"{self.fault.name}, {self.strategy}, seed {self.seed}"


def cases() -> list[Case]:
    if not SOAK:
        chosen = [(fault, "ddp") for fault in FAULTS if fault.name in CI]
        return [Case(fault, strategy, SEED + number) for number, (fault, strategy) in enumerate(chosen)]
    chosen = [(fault, PLAIN) for fault in OF_PLAIN] + [(fault, "300 steps") for fault in LONG]
    chosen += [(fault, "ddp") for fault in WITH_SPARE if NODES > 2]
    for fault in FAULTS:
        times = 1 if fault.name in ALONE else 6 if "save" in fault.name else 3
        chosen += [(fault, list(STRATEGIES)[number % 3]) for number in range(times)]
    return [Case(fault, strategy, SEED + number) for number, (fault, strategy) in enumerate(chosen)]


def kind(strategy: str) -> type[Running]:
    return Plain if strategy == PLAIN else Running


CASES = cases()
AT_ONCE = 3


class Outcomes:
    """The cases that were chosen, several at a time; what each came to."""

    def __init__(self, cluster, cases: Sequence[Case]) -> None:
        self.cluster = cluster
        self.rows: dict[Case, str] = {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            needed = sorted({case.strategy for case in cases})
            self.plain = {strategy: pool.submit(self.undisturbed, strategy) for strategy in needed}
            self.found: dict[Case, Future[None]] = {
                case: pool.submit(self.disturbed, case) for case in cases if case.fault.name not in ALONE
            }
        with ThreadPoolExecutor(1) as pool:
            self.found |= {case: pool.submit(self.disturbed, case) for case in cases if case.fault.name in ALONE}

    def undisturbed(self, strategy: str) -> tuple[dict[int, float], str]:
        with going(self.cluster, 0, *STRATEGIES[strategy], kind=kind(strategy)) as run:
            run.follow()
            assert run.result()["status"] == "done", run.output()
            return run.losses(), run.weights()

    def disturbed(self, case: Case) -> None:
        row = ["", "**no**", "", ""]
        try:
            self.hurt(case, row)
            row[1] = "yes"
        finally:
            self.rows[case] = " | ".join([f"| {case.fault.name}", f"{case.strategy}, seed {case.seed}", *row]) + " |"
            print(self.rows[case], flush=True)

    def hurt(self, case: Case, row: list[str]) -> None:
        """Fills in what was named, how many steps were taken twice, and the seconds to the next step."""
        fault, words = case.fault, (*STRATEGIES[case.strategy], *case.fault.words)
        going_on = going(self.cluster, case.seed, *words, options=fault.options, kind=kind(case.strategy))
        with fault.around(self.cluster), going_on as run:
            fault.inject(run)
            run.follow()
            seconds = run.next_step_after(run.injected) if run.injected else None
            row[0], row[2], row[3] = run.named(), str(run.lost()), "" if seconds is None else f"{seconds:.1f}"
            assert run.result()["status"] == "done", f"{run}: {row[0]}\n{run.output()[-3000:]}"
            self.same(case, run)
            assert re.search(fault.named, row[0]) if fault.named else not row[0], f"{run}: {row[0]!r}"
            assert run.lost() <= fault.lost, f"{run}: {run.lost()} steps were taken twice"

    def same(self, case: Case, run: Running) -> None:
        """Nothing is lost, and nothing is wrong."""
        losses, weights = self.plain[case.strategy].result()
        close = case.fault.close
        seen = run.losses(close)
        assert sorted(seen) == sorted(losses), f"{run}: {sorted(seen)}"
        different = {
            step: (seen[step], loss)
            for step, loss in losses.items()
            if not math.isclose(seen[step], loss, rel_tol=close)
        }
        assert not different, f"{run}: {different}"
        assert close or run.weights() == weights, f"{run}: the model is another"

    def table(self) -> str:
        head = "| fault | run | cause that was named | recovered | steps taken twice | seconds to the next step |"
        return "\n".join(
            [head, "|---|---|---|---|---:|---:|", *(self.rows[case] for case in CASES if case in self.rows)]
        )


@pytest.fixture(scope="module")
def outcomes(cluster, request: pytest.FixtureRequest) -> Outcomes:
    items = [item for item in request.session.items if item.parent is request.node]
    found = Outcomes(cluster, [item.callspec.params["case"] for item in items])
    if page := os.environ.get("DRAY_FAULTS"):
        begin, end = "<!-- make faults -->\n", "<!-- end -->\n"
        before, _, rest = Path(page).read_text().partition(begin)
        Path(page).write_text(f"{before}{begin}{found.table()}\n{end}{rest.partition(end)[2]}")
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if SOAK or case.fault.name in ALWAYS else pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_it_goes_on(outcomes: Outcomes, case: Case) -> None:
    outcomes.found[case].result()
