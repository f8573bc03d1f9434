"""`dray model import`: what others have written is the same numbers afterwards, and nothing of it is run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dray.contract.findings import ConfigError
from dray.contract.trainer import image_tasks
from dray.runs.prepare import read_recipe
from helpers import PYTHON, ROOT

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from safetensors.torch import load_file  # noqa: E402

from dray.train.checkpoint import manifest, shards  # noqa: E402
from dray.train.outputs import importing  # noqa: E402
from trainings import GPT, Forks, Run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")]
WRITERS = ROOT / "tests" / "support" / "writers.py"


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """By transformers' Trainer, save_pretrained, torch.save and torch's DCP."""
    folder = tmp_path_factory.mktemp("theirs")
    forks.python(WRITERS, "trainer", folder).check_returncode()
    return folder


@pytest.fixture(scope="session")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By DeepSpeed's three stages, here or in the image."""
    folder = tmp_path_factory.mktemp("zero")
    argv = [sys.executable, WRITERS]
    if find_spec("deepspeed") is None:
        binds = [word for bind in (f"{ROOT}/tests:{ROOT}/tests:ro", f"{folder}:{folder}") for word in ("-v", bind)]
        argv = ["docker", "run", "--rm", *binds, "--ipc", "host", "--network", "none", "dray:cpu", "python3", WRITERS]
    subprocess.run([*argv, "zero", folder], check=True, capture_output=True)
    return folder


def take(source: Path, target: Path | None = None, recipe: Any = None, **more: Any) -> None:
    fields = {"config": "", "prefix": None, "dtype": "auto", "trust": False} | more
    settings = recipe.model_dump(mode="json") if recipe else {}
    importing.run(image_tasks.Importing(str(source), str(target or ""), settings, **fields))


def recipe(folder: Path, *words: str) -> Any:
    words = (f"checkpoint.folder={folder}/kept", f"data.cache_dir={folder}/tokens", "train.steps=5", *words)
    return read_recipe(ROOT / "tests" / "tiny.toml", [*GPT, *words])


def resumable(source: Path, folder: Path, *words: str, truth: Path, **more: Any) -> None:
    """Every weight and average is the one that the other program had in memory."""
    (folder / "kept").mkdir()
    take(source, recipe=recipe(folder, *words), **more)
    reader, wanted = shards.open_checkpoint(folder / "kept" / "step-3"), load_file(truth)
    assert manifest.read_checkpoint(folder / "kept" / "step-3")["updates"] == 3
    assert reader.tensors.keys() == wanted.keys()
    assert any(tensor.abs().max() > 0 for name, tensor in wanted.items() if "exp_avg." in name)
    for name, tensor in wanted.items():
        found = torch.empty_like(tensor)
        reader.fill({name: shards.Shard(tuple(tensor.shape), 0, found)})
        assert torch.equal(found, tensor), name


def same(target: Path, truth: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = load_file(truth)
    network = AutoModelForCausalLM.from_pretrained(target)
    for name, weight in network.named_parameters():
        assert torch.equal(weight, wanted[f"weights.{name}"]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("trainer/checkpoint-3", ""),
        ("sharded", ""),
        ("pytorch_model.bin", "sharded"),
        ("old.bin", "sharded"),
        ("x.pt", "sharded"),
        ("dcp/step_3", "sharded"),
    ],
)
def test_a_model_has_the_same_numbers(written: Path, tmp_path: Path, name: str, config: str) -> None:
    take(written / name, tmp_path / "model", config=str(written / config) if config else "")
    same(
        tmp_path / "model",
        (written / name).parent / "truth.safetensors" if "dcp" in name else written / "truth.safetensors",
    )
    assert not (tmp_path / "model.part").exists()


def test_a_trainer_s_optimizer_names_no_weights(written: Path, tmp_path: Path) -> None:
    source = shutil.copytree(written / "trainer" / "checkpoint-3", tmp_path / "my out")
    with pytest.raises(ConfigError, match="a run cannot resume from this checkpoint") as refused:
        take(source, tmp_path / "model", recipe(tmp_path))
    assert refused.value.details["found"] == "transformers' Trainer"
    command = f"dray model import '{source}' --to FOLDER"
    fix = f"start a new training from its weights: {command}, then model.name=FOLDER in the recipe"
    assert refused.value.details["fix"] == fix
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_of_dcp_is_resumed(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumable(written / "dcp" / "step_3", tmp_path, "train.steps=3", truth=written / "dcp" / "truth.safetensors")
    assert "step 3 of 3, 3 updates; the recipe's run resumes from it" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_from_it(written: Path, tmp_path: Path, forks: Forks) -> None:
    """Whatever the strategy: here two ranks of fsdp."""
    (tmp_path / "kept").mkdir()
    take(written / "dcp" / "step_3", recipe=recipe(tmp_path))
    words = (f"checkpoint.folder={tmp_path}/kept", "train.strategy=fsdp")
    run = Run(forks, tmp_path / "run", 2, *words, steps="steps=5").end()
    assert "resumed at step 3" in run.said()
    assert [event["step"] for event in run.events("step")] == [4, 5]


def test_a_file_with_a_class_of_its_program_is_trusted_or_refused(written: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would run code") as refused:
        take(written / "args.pt", tmp_path / "model", config=str(written / "sharded"))
    assert refused.value.details["found"].startswith("the global ")
    take(written / "args.pt", tmp_path / "model", config=str(written / "sharded"), trust=True)
    same(tmp_path / "model", written / "truth.safetensors")


@pytest.mark.slow
def test_the_verb(written: Path, tmp_path: Path) -> None:
    """One process starts another, as `dray model generate` does; the model is one to generate with."""
    argv = [sys.executable, "-m", "dray", "model", "import", str(written / "trainer" / "checkpoint-3")]
    env = {**PYTHON, "DRAY_HOME": str(ROOT), "HOME": "/nonexistent"}
    (tmp_path / "my models").mkdir()
    target = tmp_path / "my models" / "one"
    ended = subprocess.run([*argv, "--to", target], env=env, cwd="/", capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"to train it further: model.name={target}\n" in ended.stdout
    assert {path.name for path in target.iterdir()} == {
        "config.json", "generation_config.json", "manifest.json", "model.safetensors",
    }  # fmt: skip


@pytest.mark.deepspeed
@pytest.mark.parametrize("harm", ["lose", "stage"])
def test_deepspeed_s_that_is_not_whole(zero: Path, tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(zero / "zero2", folder)
    ranks = sorted((folder / "global_step3").glob("zero_pp_rank_*_optim_states.pt"))
    if harm == "lose":
        ranks[-1].unlink()
    else:
        shutil.copy(next((zero / "zero3").glob("global_step3/zero_pp_rank_0_*_optim_states.pt")), ranks[0])
    with pytest.raises(ConfigError, match="the checkpoint is damaged"):
        take(folder, tmp_path / "model")


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_s_is_a_model_and_is_resumed(zero: Path, tmp_path: Path, stage: int) -> None:
    made = zero / f"zero{stage}"
    resumable(made, tmp_path, truth=made / "truth.safetensors")
    take(made / "global_step3", tmp_path / "model")
    same(tmp_path / "model", made / "truth.safetensors")
