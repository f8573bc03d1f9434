"""`dray generate`: what a run's model makes of a prompt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dray.contract import jobs
from helpers import PYTHON, ROOT

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from trainings import Forks, Run

pytestmark = pytest.mark.torch
BERT = tuple(
    f"model.config.{name}={value}"
    for name, value in (
        ("num_hidden_layers", 1), ("hidden_size", 16), ("num_attention_heads", 2), ("intermediate_size", 16),
        ("max_position_embeddings", 32),
    )
)  # fmt: skip


def dray(*words: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**PYTHON, "DRAY_HOME": str(ROOT), "HOME": "/nonexistent"}
    argv = [sys.executable, "-m", "dray", "generate", *words]
    return subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks: Forks) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("my runs")
    return {
        "causal": Run(forks, folder / "causal", 1, steps="steps=4").end().folder,
        "masked": Run(
            forks, folder / "masked", 1, "model.type=bert", "train.objective=masked", model=BERT, steps="steps=2"
        ).end().folder,
        "unfinished": Run(forks, folder / "unfinished", 1).folder,
    }  # fmt: skip


@pytest.fixture(scope="module")
def generate(runs, forks: Forks) -> Callable[..., tuple[int, str]]:
    """The job of `dray generate`, by a process that has imported what it needs."""

    def made(prompt: str, tokens: int = 0, temperature: float = 0.0, seed: int = 0) -> tuple[int, str]:
        model = str(runs["causal"] / "checkpoints" / "final")
        job = jobs.Generate(model, "causal", prompt, tokens, temperature, seed, trust_remote_code=False)
        return forks.job(job, runs["causal"].parent / "job")

    return made


def test_the_prompt_comes_first_and_then_as_many_tokens(runs, generate) -> None:
    ended = dray(runs["causal"], "one: the", "--tokens", "5")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("one: the")
    assert generate("one: the", 5) == (0, ended.stdout)


def test_a_temperature_makes_each_seed_another_text(generate) -> None:
    texts = {generate("one: the", temperature=2.0, seed=seed) for seed in range(3)}
    assert len(texts) == 3
    assert {code for code, _ in texts} == {0}


@pytest.mark.parametrize(
    ("prompt", "tokens", "fix"),
    [
        ("one", 30, "fix:    --tokens 29, or a shorter prompt"),
        ("o" * 40, 0, "fix:    a shorter prompt"),
    ],
)
def test_what_the_model_has_no_positions_for(generate, prompt: str, tokens: int, fix: str) -> None:
    code, output = generate(prompt, tokens)
    assert (code, fix in output) == (78, True), output


@pytest.mark.parametrize(
    ("run", "words", "code", "said"),
    [
        ("causal", ("one", "--tokens", "0"), 78, "--tokens has a wrong value\n  wanted: at least 1\n"),
        ("causal", ("one", "--temperature", "-1"), 78, "--temperature has a wrong value"),
        ("masked", ("one",), 78, "this model does not generate text"),
        ("unfinished", ("one",), 78, "the run has no final model"),
        ("none", ("one",), 78, "this is not a run folder"),
        ("empty", ("one",), 78, "no run is named"),
    ],
)
def test_what_cannot_be(runs, tmp_path: Path, run: str, words: tuple[str, ...], code: int, said: str) -> None:
    ended = dray(runs.get(run, "" if run == "empty" else tmp_path / "none"), *words)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
