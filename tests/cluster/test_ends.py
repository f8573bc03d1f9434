"""No process of a job outlives it: launchers, ranks that ignore SIGTERM, and what those have started."""

from __future__ import annotations

import itertools
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import until

pytestmark = pytest.mark.cluster

CODES = {"exits": 3, "crashes": 139}
# In the arguments of each process of a job, and of what its ranks leave behind.
MARKS = itertools.count(int(time.time()) % 1_000_000 * 100)
WHERE = "/shared/home/my ends"


@pytest.fixture
def folder(cluster) -> Path:
    """A folder of the cluster's user with the script."""
    made = cluster.shared / "home" / "my ends"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    shutil.copy(Path(__file__).parent / "scripts" / "stubborn.py", made)
    made.chmod(0o777)
    return made


@pytest.fixture
def words(root: Path):
    def given(launcher: str, how: str, mark: int) -> list[str]:
        script = f"{root}/slurm/multinode.sh"
        return [script, "preflight.when=never", f"launcher={launcher}", "--", "stubborn.py", how, str(mark)]

    return given


def left(cluster, mark: int) -> list[str]:
    """What still runs on the nodes."""
    lines = [line for node in ("n1", "n2") for line in cluster.exec(["ps", "-eo", "args"], node=node).out.splitlines()]
    return [line for line in lines if str(mark) in line]


def is_up(folder: Path, mark: int) -> bool:
    return len(list(folder.glob(f"up-{mark}-*"))) == 2


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        pytest.param("torchrun", "exits", marks=pytest.mark.slow),
        ("torchrun", "crashes"),
        pytest.param("accelerate", "exits", marks=pytest.mark.slow),
        pytest.param("accelerate", "crashes", marks=pytest.mark.slow),
        pytest.param("deepspeed", "exits", marks=pytest.mark.slow),
        pytest.param("deepspeed", "crashes", marks=pytest.mark.slow),
        pytest.param("python", "exits", marks=pytest.mark.slow),
        pytest.param("python", "crashes", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies(sbatch, cluster, folder: Path, words, launcher: str, how: str) -> None:
    mark = next(MARKS)
    ended = sbatch(*words(launcher, how, mark), workdir=WHERE)
    assert is_up(folder, mark)
    assert (ended.code, left(cluster, mark)) == (CODES[how], []), ended.output


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        pytest.param("accelerate", marks=pytest.mark.slow),
        pytest.param("deepspeed", marks=pytest.mark.slow),
        pytest.param("python", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_is_cancelled(sbatch, cluster, folder: Path, words, launcher: str) -> None:
    """Slurm signals what has mounted the image, too, and the runners may die with it."""
    mark = next(MARKS)
    with ThreadPoolExecutor() as pool:
        job = pool.submit(sbatch, *words(launcher, "loops", mark), workdir=WHERE)
        until(lambda: is_up(folder, mark))
        assert cluster.exec(["scancel", "--user=dray"]).code == 0
        job.result()
    assert left(cluster, mark) == []


@pytest.mark.parametrize("fails", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_ranks_of_the_other_node_may_save(sbatch, folder: Path, root: Path, fails: int) -> None:
    """srun kills all nodes with the first one that fails, so that one waits until the others have ended."""
    code = f"""
        if [ "$RANK" = {fails} ]; then until [ -e up ]; do sleep 0.1; done; exit 3; fi
        trap 'sleep 2; touch saved; exit 1' TERM; touch up; while :; do sleep 0.1; done"""
    words = [f"{root}/slurm/multinode.sh", "preflight.when=never", "launcher=python", "--", "bash", "-c", code]
    ended = sbatch(*words, workdir=WHERE)
    assert ended.code == 3, ended.output
    assert (folder / "saved").exists(), ended.output


@pytest.mark.slow
def test_a_run_that_is_stopped_now(sbatch, cluster, login, folder: Path, words) -> None:
    """In the grace, though it ignores SIGTERM, and with a result: KillWait has no part in it."""
    mark = next(MARKS)
    with ThreadPoolExecutor() as pool:
        job = pool.submit(sbatch, *words("torchrun", "loops", mark), workdir=WHERE)
        until(lambda: is_up(folder, mark))
        run = max((cluster.shared / "runs").glob("[!.]*"), key=lambda run: run.stat().st_ctime)
        code, out, err = login.dray("stop", f"/shared/runs/{run.name}", "--now")
        ended = job.result()
    assert (code, "stopped by dray stop at " in out) == (0, True), out + err
    assert "has not ended within" not in out
    assert (ended.result()["status"], ended.result()["reason"]) == ("stopped", "dray stop")
    assert left(cluster, mark) == []


def test_a_node_that_does_not_see_the_run_s_folder(sbatch, cluster, folder: Path, words) -> None:
    """It is on the first node's own disk."""
    mark = next(MARKS)
    ended = sbatch(*words("python", "exits", mark), workdir=WHERE, env={"DRAY_RUNS": f"/tmp/runs-{mark}"})
    assert ended.code == 78, ended.output
    lines = f"n2 does not see /tmp/runs-{mark}\n  fix:    set DRAY_RUNS to a folder that all nodes share\n"
    assert f"failed: the launch on n2: {lines}" in ended.output
    assert not is_up(folder, mark)
    assert left(cluster, mark) == []
