"""`dray generate`: what a run's model makes of a prompt."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import ROOT

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


def generate(*words: str | Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "DRAY_HOME": str(ROOT), "HOME": "/nonexistent"}
    argv = [sys.executable, "-m", "dray", "generate", *words]
    return subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[dict[str, Path]]:
    folder, forks = tmp_path_factory.mktemp("my runs"), Forks()
    yield {
        "causal": Run(forks, folder / "causal", 1, steps="steps=4").end().folder,
        "masked": Run(
            forks, folder / "masked", 1, "model.type=bert", "train.objective=masked", model=BERT, steps="steps=2"
        ).end().folder,
        "unfinished": Run(forks, folder / "unfinished", 1).folder,
    }  # fmt: skip
    forks.close()


def test_the_prompt_comes_first_and_then_as_many_tokens(runs) -> None:
    ended = generate(runs["causal"], "one: the", "--tokens", "5")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("one: the")
    assert ended.stdout == generate(runs["causal"], "one: the", "--tokens", "5").stdout
    seeds = {generate(runs["causal"], "one: the", "--temperature", "2", "--seed", seed).stdout for seed in "012"}
    assert len(seeds) == 3


@pytest.mark.parametrize(
    ("run", "words", "code", "said"),
    [
        ("causal", ("one", "--tokens", "30"), 78, "fix:    --tokens 29, or a shorter prompt"),
        ("causal", ("o" * 40,), 78, "fix:    a shorter prompt"),
        ("causal", ("one", "--tokens", "0"), 2, "greater than or equal to 1"),
        ("causal", ("one", "--temperature", "-1"), 2, "Invalid value for '--temperature'"),
        ("masked", ("one",), 78, "this model does not generate text"),
        ("unfinished", ("one",), 78, "the run has no final model"),
        ("none", ("one",), 78, "this is not a run folder"),
    ],
)
def test_what_cannot_be(runs, tmp_path: Path, run: str, words: tuple[str, ...], code: int, said: str) -> None:
    ended = generate(runs.get(run, tmp_path / "none"), *words)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
