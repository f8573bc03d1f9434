"""What goes wrong on a real cluster ends in one clear message, the contract's exit code and a cause on disk."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from following import RECIPE, new
from helpers import until

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_a_rank_that_fails_fails_the_job_with_its_cause(sbatch) -> None:
    ended = sbatch(*RECIPE, "model.config.n_layers=3")
    assert ended.code == 78
    result = ended.result()
    assert (result["status"], result["exit_code"]) == ("failed", 78)
    cause = result["cause"]
    assert (cause["node"] in ("n1", "n2"), cause["rank"] in range(2)) == (True, True)
    assert (cause["code"], cause["why"]) == (78, "exit code 78")
    assert cause["last_lines"][:4] == [
        "a gpt2 configuration has no 'n_layers'",
        "  wanted: n_layer",
        "  found:  model.config.n_layers",
        "  fix:    correct model.config in the recipe",
    ]
    assert f"failed: rank {cause['rank']} on {cause['node']}: exit code 78" in ended.output


def test_another_image_than_the_recipe_s_stops_before_it_starts(sbatch, sif) -> None:
    digest = f"sha256:{hashlib.sha256(sif.read_bytes()).hexdigest()}"
    ended = sbatch(*RECIPE, f"image_digest={digest[:-1]}{'0' if digest[-1] != '0' else '1'}")
    assert ended.code == 78
    assert "dray: the image has another digest than the recipe" in ended.output
    assert f"  found:  {digest}" in ended.output
    assert ended.folder is None


def test_a_place_that_the_nodes_lack(sbatch) -> None:
    ended = sbatch(*RECIPE, "data.train=/no/such/text.txt")
    assert ended.code == 69
    cause = ended.result()["cause"]
    assert (cause["node"] in ("n1", "n2"), cause["rank"]) == (True, None)
    assert cause["why"] == "/no/such/text.txt does not exist\n  wanted: recipe data.train: the training dataset"


def test_a_busy_port_is_try_again(sbatch, cluster) -> None:
    (port,) = (
        line.split("=")[1].strip()
        for line in cluster.exec(["scontrol", "show", "config"])[1].splitlines()
        if line.startswith("SlurmdPort ")
    )
    ended = sbatch(*RECIPE, f"port={port}")
    assert ended.code == 75
    assert ended.result()["cause"]["why"].splitlines()[0] == f"port {port} is busy on n1"


def test_a_wrong_recipe_stops_before_anything_is_written(sbatch, cluster) -> None:
    before = set((cluster.shared / "runs").glob("[!.]*"))
    ended = sbatch(*RECIPE, "train.stesp=5")
    assert ended.code == 78
    assert "unknown key: did you mean `steps`?" in ended.output
    assert set((cluster.shared / "runs").glob("[!.]*")) == before


@pytest.mark.slow
def test_a_batch_that_does_not_come_out_for_the_nodes_given(sbatch) -> None:
    ended = sbatch(*RECIPE, "batch.global_size=9")
    assert ended.code == 78
    assert "dray: global batch 9 is not divisible by 2 ranks" in ended.output


@pytest.mark.slow
def test_no_recipe_and_no_such_recipe(sbatch) -> None:
    assert "dray: there is nothing to run" in sbatch("slurm/multinode.sh").output
    ended = sbatch("slurm/multinode.sh", "recipes/nothing.toml")
    assert (ended.code, "dray: there is no recipe recipes/nothing.toml" in ended.output) == (78, True)


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_signal(sbatch, cluster) -> None:
    before = set((cluster.shared / "runs").glob("[!.]*"))
    with ThreadPoolExecutor() as pool:
        job = pool.submit(sbatch, *RECIPE, "train.steps=5000", "train.log_every=1")
        until(lambda: any('"step"' in path.read_text() for path in new(cluster, before, "metrics.jsonl")))
        code, out, err = cluster.exec(["pkill", "-KILL", "--oldest", "-f", "^python3 -m dray.train"], node="n2")
        assert code == 0, out + err
        ended = job.result()
    assert ended.code == 137
    cause = ended.result()["cause"]
    assert (cause["node"], cause["rank"], cause["why"]) == ("n2", 1, "killed by SIGKILL")


@pytest.mark.slow
def test_a_cancelled_job_still_says_how_it_ended(sbatch, cluster) -> None:
    before = set((cluster.shared / "runs").glob("[!.]*"))
    with ThreadPoolExecutor() as pool:
        job = pool.submit(sbatch, *RECIPE, "train.steps=5000", "train.log_every=1")
        until(lambda: any('"step"' in path.read_text() for path in new(cluster, before, "metrics.jsonl")))
        assert cluster.exec(["scancel", "--user=dray"]).code == 0
        ended = job.result()
    until(lambda: bool(new(cluster, before, "result.json")))  # Slurm calls the job ended before its script has
    result = ended.result()
    assert (result["status"], result["exit_code"], result["cause"]) == ("stopped", 143, None)
    assert result["steps"] >= 1


def test_an_image_without_dray(sbatch, cluster, root: Path) -> None:
    """A real SIF that has a shell and no Python, made as a user would make one."""
    made = cluster.exec(["bash", "-c", TINY_SIF, "tiny", "/shared/home/other.sif"])
    assert made.code == 0, made.err
    ended = sbatch(*RECIPE, env={"DRAY_IMAGE": "/shared/home/other.sif"})
    assert ended.code == 78
    said = ended.output[ended.output.index("dray: ") :]
    assert said == (root / "tests" / "golden" / "image-without-dray.txt").read_text()


TINY_SIF = """
set -e
root=$(mktemp -d)
mkdir -p "$root"/{bin,dev,etc,proc,sys,tmp,usr,var}
libraries=$(ldd /bin/bash | grep -o '/[^ ]*')
cp --parents -L /bin/bash $libraries "$root"
ln -s bash "$root/bin/sh"
apptainer --silent build --force "$1" "$root"
"""


def test_runs_in_a_place_that_cannot_be_written(sbatch) -> None:
    ended = sbatch(*RECIPE, env={"DRAY_RUNS": "/proc/runs"})
    assert ended.code == 78
    assert "dray: the folder for runs cannot be made\n  where:  /proc/runs on node n1\n" in ended.output


def test_a_missing_image(sbatch) -> None:
    ended = sbatch(*RECIPE, env={"DRAY_IMAGE": "/shared/gone.sif"})
    assert ended.code == 78
    assert "dray: the image does not exist\n  wanted: /shared/gone.sif (the recipe's image is cpu)\n" in ended.output
