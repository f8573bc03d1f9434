"""A program of a user's own, which knows only SIGUSR1 and exit code 75, is hurt and goes on by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from running import Running, going

from helpers import ROOT

pytestmark = pytest.mark.cluster
STEPS = 200


def time_is_near(run: Running) -> None:
    assert run.cluster.exec(["scancel", "--batch", "--signal=USR1", run.jobs[-1]]).code == 0


def kill_rank(run: Running) -> None:
    run.kill("n2", "^python3 [^ ]*plain.py /shared/home/plain-")


@pytest.mark.parametrize(("inject", "again"), [(time_is_near, 0), (kill_rank, 10)])
def test_it_goes_on_with_the_same_numbers(cluster, inject: Callable[[Running], None], again: int) -> None:
    """Only steps since it saved itself are taken twice."""
    folder = f"/shared/home/plain-{inject.__name__}"
    cluster.exec(["rm", "-rf", folder])
    recipe = (
        "launcher=python", "ranks_per_node=1", "preflight.when=never", "max_restarts=1", "max_requeues=1", "--",
        "python3", f"{ROOT}/tests/faults/plain.py", folder, str(STEPS),
    )  # fmt: skip
    with going(cluster, 1, recipe=recipe) as run:
        logs = [cluster.shared / folder.removeprefix("/shared/") / f"log-{rank}" for rank in range(2)]
        run.until(lambda: all(log.exists() and len(log.read_text().splitlines()) > 25 for log in logs))
        inject(run)
        run.follow()
        assert run.result()["status"] == "done", run.output()
    for log in logs:
        value, seen = 1, dict[int, int]()
        lines = [tuple(map(int, line.split()[:2])) for line in log.read_text().splitlines()]
        for step, number in lines:
            assert seen.setdefault(step, number) == number
        assert sorted(seen) == list(range(1, STEPS + 1))
        for step in range(1, STEPS + 1):
            value = (value * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            assert seen[step] == value
        assert len(lines) - STEPS <= again
