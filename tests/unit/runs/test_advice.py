"""Notes on a plan, before its job waits in a queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command import dray
from dray.contract.findings import Finding
from dray.facts import Facts
from dray.runs.prepare import at_site, decide, read_recipe
from dray.runs.store import RunPaths
from helpers import ROOT

ASKED = ("--time=08:00:00", "--cpus-per-task=8")


def notes(*words: str, name="smoke-cpu", site="generic", options=ASKED, home: Path | None = None) -> list[Finding]:
    recipe = read_recipe(ROOT / "recipes" / f"{name}.toml", words)
    cpu = name == "smoke-cpu" and not any(word.startswith("image=") for word in words)
    gpus = 0 if cpu else 2
    facts = Facts(scheduler="slurm", nodelist="n[1-2]", nodes=2, gpus_per_node=gpus, engine="apptainer", image="/i.sif",
                  site=site, login="here", account="p1", options=options,
                  hf_home=str(home) if home else None)  # fmt: skip
    findings = decide(recipe, *at_site(facts), RunPaths(Path("/runs/r"))).findings
    assert {finding.code for finding in findings} <= {0}
    return [finding for finding in findings if finding.level == "note"]


def problems(*words: str, **more: Any) -> list[str]:
    return [finding.problem for finding in notes(*words, **more)]


def test_nothing_is_found_where_all_is_well(tmp_path: Path) -> None:
    for folder in ("models--openai-community--gpt2", "datasets--Salesforce--wikitext"):
        (tmp_path / "hub" / folder).mkdir(parents=True)
    assert notes() == []
    assert notes(name="gpt2-wikitext-ddp", home=tmp_path) == []


def test_what_a_job_gets_by_default() -> None:
    assert [(note.problem, note.fix) for note in notes(options=())] == [
        ("the job gets one hour, the default of the batch script", "--sbatch=--time=08:00:00"),
        (
            "the job asks for no cores, and many clusters then give it one",
            "--sbatch=--cpus-per-task=N (or --sbatch=--exclusive)",
        ),
    ]
    assert notes(options=("-t", "60", "-c8")) == notes(options=("--exclusive", "--time=1")) == []


def test_what_is_the_same_each_time_comes_with_the_first_run_alone(tmp_path: Path) -> None:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
    facts = Facts(scheduler="slurm", nodelist="n1", nodes=1, engine="apptainer", image="/i.sif", login="here")

    def problems(run: str, attempt: int = 1) -> list[str]:
        found = decide(recipe, *at_site(facts), RunPaths(tmp_path / run, attempt)).findings
        return [one.problem for one in found if one.level == "note"]

    first = "20261101-000000-smoke-cpu-7"
    assert len(problems(first)) == 2
    (tmp_path / first).mkdir()
    assert len(problems(first)) == 2  # its own folder is no earlier run
    assert (problems("20261102-000000-smoke-cpu-8"), problems("mine")) == ([], [])
    assert problems(first, attempt=2) == []


def test_gpus_of_another_kind() -> None:
    (others,) = notes("image=cuda", "train.precision=fp16", site="iris")
    assert (others.problem, others.found) == ("site iris has GPUs for image=cuda12", "image=cuda")
    (half,) = notes("image=cuda12", "train.precision=bf16")
    assert half.problem == "GPUs before A100 (V100) emulate bf16"
    assert notes("image=cuda12", "train.precision=fp16", site="iris") == []
    (newer,) = notes("image=rocm", site="lumi")
    assert (newer.problem, newer.found) == ("site lumi has GPUs for image=rocm6", "image=rocm")
    assert newer.source.startswith(
        "MI250X. By AMD and LUMI its driver, 6.3, supports ROCm 6.1 to 7.0, and the rocm image"
    )


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (("launcher=deepspeed", "image=cpu"), True),
        (("launcher=deepspeed", "image=cuda"), False),
        (("launcher=torchrun", "image=cpu"), False),
    ],
)
def test_deepspeed_that_accelerate_leaves_out(words: tuple[str, ...], noted: bool) -> None:
    facts = Facts(scheduler="slurm", nodelist="n[1-2]", nodes=2, gpus_per_node=2, engine="apptainer", image="/i.sif")
    plan = decide(read_recipe(None, words, ["train.py"]), *at_site(facts), RunPaths(Path("/runs/r")))
    problem = "on a CPU transformers' Trainer and accelerate silently train without FSDP and DeepSpeed"
    assert (problem in {finding.problem for finding in plan.findings}) is noted


def test_weights_that_hardly_move() -> None:
    assert problems("model.dtype=bf16") == ["16-bit weights lose updates that are much smaller"]
    assert notes("model.dtype=bf16", "train.strategy=zero2") == []


def test_a_fabric_that_wants_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notes("image=rocm6", site="lumi") == []  # it takes the image's
    lumi = (ROOT / "slurm" / "sites" / "lumi.toml").read_text()
    (tmp_path / "without.toml").write_text(lumi.replace('plugin = "image"\n', "").replace('"lumi"', '"without"'))
    monkeypatch.setenv("DRAY_SITES", str(tmp_path))
    (problem,) = problems("image=rocm6", site="without")
    assert problem.startswith("site without names no NCCL or RCCL plugin for cxi; ")
    assert notes(site="without") == []  # on CPUs


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--openai-community--gpt2").mkdir(parents=True)
    (note,) = notes(name="gpt2-wikitext-ddp", home=tmp_path)
    assert (note.problem, note.fix) == (
        "the job is offline, and files that it needs are not downloaded",
        "dray data prefetch RECIPE",
    )
    assert note.found == f"not in HF_HOME ({tmp_path}): Salesforce/wikitext"
    (note,) = notes(name="gpt2-wikitext-ddp")
    assert note.found == "not in HF_HOME (/runs/.cache-0/huggingface): openai-community/gpt2, Salesforce/wikitext"
    assert notes("env.HF_HUB_OFFLINE=0", name="gpt2-wikitext-ddp") == []
    streamed = "data.train=hf://datasets/me/texts/*.jsonl"
    assert [note.problem for note in notes(streamed)] == ["data.train is read from the hub, and the job is offline"]
    assert notes(streamed, "env.HF_HUB_OFFLINE=0") == []
    assert problems("data.train=/no/such.txt") == ["data.train = /no/such.txt does not exist on this machine"]
    assert problems("data.train=/no/such-*.txt") == ["data.train = /no/such-*.txt does not exist on this machine"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--sbatch=--gres=gpu:4",), "dray: dray must plan with this option, so it cannot be given by --sbatch"),
        (("--sbatch=--gpus=4",), "dray: dray must plan with this option, so it cannot be given by --sbatch"),
        (("--sbatch=-N3",), "dray: dray must plan with this option, so it cannot be given by --sbatch"),
        (("--sbatch=--time 60",), "dray: an option of sbatch must be one word"),
        (("image=cuda",), "dray: a cuda run needs GPUs, and the scheduler gave none"),
        (("--json",), "dray: two options exclude each other"),
        (("--on=a", "--first=b,c"), "dray: two options exclude each other"),
        (("--on=a", "--follow"), "dray: two options exclude each other"),
    ],
)
def test_what_is_refused_before_it_is_submitted(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    ended = dray("submit", "smoke-cpu", "--dry-run", *words, cwd=tmp_path, HOME=str(tmp_path))
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (78, problem)


@pytest.mark.seconds
def test_a_recipe_of_dray_is_found_from_everywhere(tmp_path: Path) -> None:
    for name in ("smoke-cpu", "recipes/smoke-cpu.toml"):
        ended = dray("recipe", "check", name, cwd=tmp_path, HOME=str(tmp_path))
        assert (ended.returncode, ended.stdout.startswith(f"{ROOT}/recipes/smoke-cpu.toml: good")) == (0, True)
    ended = dray("recipe", "check", "smoke-cpo", cwd=tmp_path, HOME=str(tmp_path))
    assert ended.stderr.startswith(
        f"dray: recipe {ROOT}/recipes/smoke-cpo.toml does not exist\n"
        f"  fix:    did you mean `{ROOT}/recipes/smoke-cpu.toml`?"
    )
