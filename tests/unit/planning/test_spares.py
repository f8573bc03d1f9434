"""Nodes that take part only when another one has failed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError, UnfitError
from dray.facts import Facts, parse, to_text
from dray.planning import world
from dray.runs import submit
from dray.runs.prepare import at_site, read_recipe, write
from jobs import SRUN, Job


def facts(nodes: int, *lost: str) -> Facts:
    return Facts(
        scheduler="slurm", job=17, nodelist=f"n[1-{nodes}]", nodes=nodes, engine="apptainer", image="/i.sif", lost=lost
    )


def recipe(root: Path, **values: int) -> Recipe:
    """Of two ranks a node."""
    return read_recipe(root / "recipes" / "smoke-cpu.toml", [f"{key}={value}" for key, value in values.items()])


@pytest.mark.parametrize(
    ("nodes", "spares", "lost", "used", "left"),
    [
        (3, 1, (), ["n1", "n2"], ("n3",)),
        (3, 1, ("n2",), ["n1", "n3"], ()),
        (4, 2, ("n1",), ["n2", "n3"], ("n4",)),
        (4, 2, ("n1", "n4"), ["n2", "n3"], ()),
        (2, 0, (), ["n1", "n2"], ()),
    ],
)
def test_who_takes_part(
    root: Path, nodes: int, spares: int, lost: tuple[str, ...], used: list[str], left: tuple[str, ...]
) -> None:
    found = world.select(recipe(root, spares=spares), facts(nodes, *lost))
    assert (found.hosts(), found.spares, found.lost) == (used, left, lost)
    assert parse(to_text(found), where="test") == found


def test_none_is_left(root: Path) -> None:
    with pytest.raises(UnfitError, match="no spare node is left") as caught:
        world.select(recipe(root, spares=1), facts(3, "n1", "n3"))
    assert "n2; n1 n3 failed before" in str(caught.value)


@pytest.mark.parametrize("spares", [2, 3])
def test_all_would_be_spare(root: Path, spares: int) -> None:
    with pytest.raises(ConfigError) as caught:
        world.select(recipe(root, spares=spares), facts(2))
    assert f"sbatch --nodes={spares + 1} or more, or spares=0" in str(caught.value)


def test_the_plan_and_srun_have_those_that_take_part(root: Path, tmp_path: Path) -> None:
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", ["spares=1"])
    plan, paths = write(recipe, facts(3, "n2"), runs=tmp_path)
    assert [node.name for node in plan.world.nodes] == ["n1", "n3"]
    assert plan.reasons["nodes"].endswith("; spare: none; failed: n2")
    assert paths.srun_options.read_text().split() == ["--nodes=2", "--ntasks=2", "--nodelist=n1,n3", "--no-kill"]


@pytest.mark.parametrize(
    ("nodes", "lost", "least", "used", "left", "each"),
    [
        (4, ("n2",), 1, ["n1", "n3"], ("n4",), (4, 2)),  # 32 rows do not divide over three nodes' ranks
        (4, ("n2", "n3"), 2, ["n1", "n4"], (), (4, 2)),
        (4, ("n2", "n3", "n4"), 1, ["n1"], (), (4, 4)),
        (2, (), 1, ["n1", "n2"], (), (4, 2)),
    ],
)
def test_fewer_nodes_with_the_same_global_batch(
    root: Path, tmp_path: Path, nodes: int, lost: tuple[str, ...], least: int, used: list[str],
    left: tuple[str, ...], each: tuple[int, int],
) -> None:  # fmt: skip
    """No rank takes more rows at a time than at first: they have to fit."""
    asked = ["min_nodes=" + str(least), f"nodes={nodes}", "ranks_per_node=2", "batch.global_size=32"]
    given = read_recipe(root / "recipes" / "smoke-cpu.toml", asked)
    plan, paths = write(given, facts(nodes, *lost), runs=tmp_path)
    assert ([node.name for node in plan.world.nodes], plan.world.spares) == (used, left)
    assert plan.batch
    assert (plan.batch.per_device, plan.batch.gradient_accumulation_steps) == each
    assert "--no-kill" in paths.srun_options.read_text()
    fewer = f"; {nodes - len(used)} fewer than at first (min_nodes = {least})" if lost else ""
    assert plan.reasons["nodes"].endswith(fewer)


def test_too_few_are_left(root: Path) -> None:
    with pytest.raises(UnfitError, match="no spare node is left"):
        world.select(recipe(root, nodes=3, min_nodes=2), facts(3, "n1", "n3"))


def test_more_than_nodes() -> None:
    with pytest.raises(ConfigError, match="min_nodes = 3: expected at most nodes, which is 1"):
        read_recipe(None, ["min_nodes=3"], ["true"])


def test_submit_asks_for_them(root: Path) -> None:
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", ["spares=1", "nodes=4"])
    site = at_site(facts(5))[1].site
    options = submit.options(recipe, site, 0, None)
    assert options == ["--job-name=smoke-cpu", "--nodes=5", "--ntasks-per-node=1", "--no-kill"]
    assert "--nodes=9" in submit.options(recipe, site, 0, 8)


NAME = 'next(word[11:] for word in sys.argv if word.startswith("--nodelist="))'
PROGRAM = '[[ $SLURMD_NODENAME != n1 ]] || exit 69; echo "here is $SLURMD_NODENAME"'


@pytest.fixture
def two(tmp_path: Path) -> Job:
    """A job with two nodes, of which each start gets the one that the plan names."""
    job = Job(tmp_path)
    job.tool("srun", SRUN.replace('"n1"', NAME))
    job.tool("scontrol", "#!/bin/bash\nexit 1\n")
    job.env |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    return job


def ended(job: Job) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    words = ["launcher=python", "spares=1", "--", "bash", "-c", PROGRAM]
    done = subprocess.run(
        job.argv(*words, plan_only=False),
        env=job.env,
        cwd=job.home,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    (run,) = job.runs.glob("[!.]*")
    return done, [json.loads((run / f"attempt-{number}" / "result.json").read_text()) for number in (1, 2)]


@pytest.mark.seconds
def test_the_job_goes_on_with_a_spare_node(two: Job) -> None:
    """By the real batch script, node.sh and runner: the second attempt in the run folder is on the other node."""
    done, (first, second) = ended(two)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (first["exit_code"], first["hosts"], first["next"]["exclude"]) == (69, ["n1"], ["n1"])
    assert (second["status"], second["hosts"]) == ("done", ["n2"])
    assert "spare nodes take over: n2, without n1\n" in done.stdout
    (log,) = two.runs.glob("*/attempt-2/logs/rank-0.log")
    assert log.read_text() == "here is n2\n"


@pytest.mark.seconds
@pytest.mark.parametrize("all_processes", [False, True])
def test_a_signal_before_the_spare_node_takes_over_is_heard(two: Job, all_processes: bool) -> None:
    """While the first result is written: of sbatch --signal=B:USR1 the script alone hears, of scancel all do."""
    told = two.home / "told"
    whom = "-TERM -- -$job" if all_processes else "-USR1 $job"
    once = f"[[ ! -e '{told}' ]] || exit 1\n>'{told}'\njob=$(ps -o sid= -p $$ | tr -d ' ')"
    two.tool("scontrol", f"#!/bin/bash\n{once}\nkill {whom}\n")
    done, (first, second) = ended(two)
    assert told.exists()
    assert (first["exit_code"], first["next"]["spare"]) == (69, True), done.stdout + done.stderr
    assert (second["status"], second["reason"]) == ("stopped", "SIGTERM" if all_processes else "SIGUSR1"), done.stdout


def test_a_requeued_job_with_all_its_nodes_again_goes_on_in_the_run(root: Path, tmp_path: Path) -> None:
    """Though with fewer nodes another loss was chosen: each rank took fewer rows at a time."""
    words = ["image=cuda", "nodes=4", "min_nodes=1", "batch.per_device=3", "batch.global_size=12"]
    given = read_recipe(root / "recipes" / "smoke-cpu.toml", [*words, "model.config.vocab_size=500000"])
    four = facts(4).model_copy(update={"gpus_per_node": 1})
    first, _ = write(given, four, runs=tmp_path)
    lost = four.model_copy(update={"lost": ("n2",)})
    second, _ = write(given, lost, runs=tmp_path, run=first.run)
    assert first.recipe.train
    assert second.recipe.train
    assert (first.recipe.train.loss, second.recipe.train.loss) == ("chunked", "full")
    third, _ = write(given, four.model_copy(update={"restarts": 1}), runs=tmp_path)
    assert (third.run, third.attempt) == (first.run, 3)
