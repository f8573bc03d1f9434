"""What is said before a job waits in a queue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dray.config import sites
from dray.facts import Facts
from dray.planning import advice
from dray.runs.paths import RunPaths
from dray.runs.write import decide, read_recipe
from helpers import ROOT

ASKED = ("--time=08:00:00", "--cpus-per-task=8")


def said(*words: str, name="smoke-cpu", site="generic", options=ASKED, home: Path | None = None) -> list[str]:
    recipe = read_recipe(ROOT / "recipes" / f"{name}.toml", words)
    facts = Facts(scheduler="slurm", nodelist="n[1-2]", nodes=2, gpus_per_node=2, engine="apptainer", image="/i.sif",
                  site=site, login="here", hf_home=str(home) if home else None)  # fmt: skip
    decided = decide(recipe, facts, RunPaths(Path("/runs/r")))
    lines = advice.lines(decided, sites.find(site), options).splitlines()
    return [line.removeprefix("dray: note: ") for line in lines]


def test_nothing_is_said_where_all_is_well(tmp_path: Path) -> None:
    for folder in ("models--openai-community--gpt2", "datasets--Salesforce--wikitext"):
        (tmp_path / "hub" / folder).mkdir(parents=True)
    assert said() == []
    assert said(name="gpt2-wikitext-ddp", home=tmp_path) == []


def test_what_a_job_gets_unasked() -> None:
    assert said(options=()) == [
        "the job has one hour, unless sbatch is told otherwise: --sbatch=--time=08:00:00",
        "no cores are asked for, and many clusters then give one: --sbatch=--cpus-per-task=N (or --exclusive)",
    ]
    assert said(options=("-t", "60", "-c8")) == said(options=("--exclusive", "--time=1")) == []


def test_gpus_of_another_kind() -> None:
    others, half = said("image=cuda", "train.precision=bf16", site="iris")
    assert others == "site iris has GPUs for image=cuda12; image=cuda is for others"
    assert half == "GPUs before A100 have no bf16: train.precision=fp16"
    assert said("image=cuda12", "train.precision=fp16", site="iris") == []


def test_weights_that_hardly_move() -> None:
    (line,) = said("model.dtype=bf16")
    assert line.startswith("weights of 16 bits lose changes that are small beside them: ")
    assert said("model.dtype=bf16", "train.strategy=zero2") == []


def test_a_fabric_that_wants_a_plugin() -> None:
    (line,) = said("image=rocm", site="lumi")
    assert line.startswith("site lumi names no NCCL or RCCL plugin for cxi; ")
    assert said(site="lumi") == []  # on CPUs


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--openai-community--gpt2").mkdir(parents=True)
    (line,) = said(name="gpt2-wikitext-ddp", home=tmp_path)
    assert line == (
        f"the job is offline, and what it needs is not in HF_HOME ({tmp_path}), as it is seen here: "
        "Salesforce/wikitext; dray prefetch RECIPE brings it"
    )
    (line,) = said(name="gpt2-wikitext-ddp")
    assert "not there, since HF_HOME is not set: openai-community/gpt2, Salesforce/wikitext; " in line
    assert said("env.HF_HUB_OFFLINE=0", name="gpt2-wikitext-ddp") == []
    (line,) = said("data.train=/no/such.txt")
    assert line == "data.train = /no/such.txt is not here; the nodes must have it (what the hub has is hub:OWNER/NAME)"
    assert said("data.train=/no/such-*.txt") == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--sbatch=--gres=gpu:4",), "dray: the plan would not know of this option of sbatch"),
        (("--sbatch=--gpus=4",), "dray: the plan would not know of this option of sbatch"),
        (("--sbatch=-N3",), "dray: the plan would not know of this option of sbatch"),
        (("--sbatch=--time 60",), "dray: an option of sbatch is one word"),
        (("image=cuda",), "dray: a cuda run needs GPUs, and the scheduler gave none"),
    ],
)
def test_what_is_refused_before_it_is_submitted(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    argv = [sys.executable, "-m", "dray", "submit", "smoke-cpu", "--dry-run", *words]
    env = {"PATH": os.environ["PATH"], "DRAY_HOME": str(ROOT), "HOME": str(tmp_path)}
    ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (78, problem)


def test_a_recipe_of_dray_is_found_from_everywhere(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "DRAY_HOME": str(ROOT), "HOME": str(tmp_path)}
    for name in ("smoke-cpu", "recipes/smoke-cpu.toml"):
        argv = [sys.executable, "-m", "dray", "recipe", "check", name]
        ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout.startswith(f"{ROOT}/recipes/smoke-cpu.toml: good")) == (0, True)
    argv = [sys.executable, "-m", "dray", "recipe", "check", "smoke-cpo"]
    ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.stderr.startswith(
        f"dray: recipe {ROOT}/recipes/smoke-cpo.toml does not exist\n  fix:    did you mean `smoke-cpu.toml`?"
    )
