"""`dray model generate`: what a run's model makes of a prompt."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import command
from dray.contract.trainer import image_tasks

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.train.checkpoint import manifest
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
    return command.dray("model", "generate", *words, cwd="/")


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
    """The job of `dray model generate`, by a process that has imported what it needs."""

    def made(prompt: str, tokens: int = 0, temperature: float = 0.0, seed: int = 0) -> tuple[int, str]:
        model = str(runs["causal"] / "checkpoints" / "final")
        job = image_tasks.Generate(model, "causal", prompt, tokens, temperature, seed, trust_remote_code=False)
        return forks.job(job, runs["causal"].parent / "job")

    return made


@pytest.mark.slow
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
        ("causal", ("one", "--tokens", "0"), 78, "for '--tokens': Input should be greater than or equal to 1\n"),
        ("causal", ("one", "--temperature", "-1"), 78, "invalid value for '--temperature': Input"),
        pytest.param("masked", ("one",), 78, "this model does not generate text", marks=pytest.mark.slow),
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


def with_setting(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def with_noise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def with_few_bytes(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def with_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")


def with_code(folder: Path) -> None:
    (folder / "theirs.py").write_text("open('ran', 'w')\n")
    with_setting(
        folder, model_type="theirs", auto_map={"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.M"}
    )


def with_a_template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)


READ, TAKEN = "the model cannot be read", "the chat template refuses the prompt"


@pytest.mark.parametrize(
    ("damage", "objective", "problem", "found"),
    [
        (with_noise, "causal", READ, "SafetensorError: "),
        (with_few_bytes, "causal", READ, "SafetensorError: "),
        (with_a_pickle, "causal", READ, "no file named model.safetensors"),
        (with_code, "causal", READ, "contains custom code"),
        (lambda folder: with_setting(folder, n_embd="fp16"), "causal", READ, "Field 'n_embd' expected int, got str"),
        (lambda folder: with_setting(folder, n_embd=64), "causal", READ, "RuntimeError: "),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "causal", READ, "TypeError: "),
        (lambda folder: with_a_template(folder, "{% for"), "sft", TAKEN, "TemplateSyntaxError: "),
        (lambda folder: with_a_template(folder, "{{ messages[7].content.x }}"), "sft", TAKEN, "UndefinedError: "),
        (lambda folder: with_a_template(folder, "{{ 1 / 0 }}"), "sft", TAKEN, "ZeroDivisionError: "),
    ],
)
def test_files_that_somebody_else_made(
    runs, forks: Forks, tmp_path: Path, damage: Callable[[Path], object], objective: str, problem: str, found: str
) -> None:
    """With a manifest of their maker's, so that it is transformers that refuses them."""
    folder = tmp_path / "model"
    shutil.copytree(runs["causal"] / "checkpoints" / "final", folder)
    damage(folder)
    manifest.seal_model(folder)
    job = image_tasks.Generate(str(folder), objective, "one", 2, 0.0, 0, trust_remote_code=False)
    code, output = forks.job(job, tmp_path / "job")
    *_, problem_line, where, _, found_line, _ = output.splitlines()
    assert (code, problem_line, where) == (78, problem, f"  where:  {folder}"), output
    assert found in found_line
    assert not Path("ran").exists()
