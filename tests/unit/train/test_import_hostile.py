"""`dray checkpoint import` of what is no checkpoint, of another model, damaged, or made to harm who imports it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from safetensors.torch import save_file  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from dray.cli import checkpoint  # noqa: E402
from dray.contract.findings import ConfigError  # noqa: E402
from dray.contract.jobs import Importing  # noqa: E402
from dray.runs.write import read_recipe  # noqa: E402
from dray.train.outputs import importing  # noqa: E402
from helpers import ROOT  # noqa: E402
from trainings import GPT  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.hostile("checkpoints of others")]


class Member:
    """A member of an enumeration of DeepSpeed's, as Python 3.11.2 pickles it; or anything's attribute."""

    def __init__(self, of: object) -> None:
        self.of = of

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, "member")


class Planted:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.mark}'",)


def network() -> GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 257}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=256, eos_token_id=256))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (folder / "model.safetensors").unlink(missing_ok=True)
    return {name: one.clone() for name, one in network().state_dict().items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """As Trainer leaves it after one step, by torch's own AdamW."""
    folder, net = tmp_path / "checkpoint-1", network()
    net.save_pretrained(folder)
    matrices, others = ([one for one in net.parameters() if (one.dim() > 1) == big] for big in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}])
    net(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long()).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    return folder


def take(
    source: Path, *, resume: bool = False, trust: bool = False, config: str = "", words: tuple[str, ...] = ()
) -> None:
    folder, settings = source.parent, {}
    if resume:
        words = (f"checkpoint.folder={folder}/kept", f"data.cache_dir={folder}/tokens", "train.steps=5", *words)
        settings = read_recipe(ROOT / "tests" / "tiny.toml", [*GPT, *words]).model_dump(mode="json")
    target = "" if resume else str(folder / "model")
    importing.run(Importing(str(source), target, settings, "", None, "auto", 4.0, trust))


def test_the_plain_one_is_taken(source: Path) -> None:
    take(source)
    take(source, resume=True)
    assert (source.parent / "kept" / "step-1" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin"])
def test_a_planted_pickle_runs_only_where_it_is_trusted(source: Path, name: str) -> None:
    mark = source.parent / "mark"
    planted = (
        {"state": Planted(mark), "param_groups": []}
        if name == "optimizer.pt"
        else weights(source) | {"x": Planted(mark)}
    )
    torch.save(planted, source / name)
    with pytest.raises(ConfigError, match="the file is a pickle that would run code") as refused:
        take(source, resume=True)
    assert refused.value.details["found"] == "the global posix.system"
    assert refused.value.details["fix"].startswith("--trust, ")
    assert not mark.exists()
    if name == "pytorch_model.bin":
        take(source, trust=True)
        assert mark.exists()


def test_a_member_of_an_enumeration_is_taken_and_no_other_attribute(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = type("Stages", (), {"__module__": "deepspeed.stages", "member": 1})
    with monkeypatch.context() as there:
        for name in ("deepspeed", "deepspeed.stages"):
            there.setitem(sys.modules, name, ModuleType(name))
        there.setattr(sys.modules["deepspeed.stages"], "Stages", stages, raising=False)
        torch.save(weights(source) | {"stage": Member(stages)}, source / "pytorch_model.bin")
    take(source)
    shutil.rmtree(source.parent / "model")
    torch.save(weights(source) | {"stage": Member(torch.Tensor)}, source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="the file is a pickle that would run code") as refused:
        take(source)
    assert refused.value.details["found"] == "the global builtins.getattr"


def far(folder: Path) -> None:
    """As many numbers as the model has, in a file of one."""
    stored = weights(folder)
    stored["transformer.wte.weight"] = torch.zeros(1).expand(257, 32)
    torch.save(stored, folder / "pytorch_model.bin")


def other_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def linked(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def piped(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 50000)


def cut_torch(folder: Path) -> None:
    torch.save(weights(folder), folder / "pytorch_model.bin")
    os.truncate(folder / "pytorch_model.bin", 50000)


def sharded(**places: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.move(folder / "model.safetensors", folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return change


def lost(folder: Path) -> None:
    stored = weights(folder)
    del stored["transformer.h.0.ln_1.bias"], stored["lm_head.weight"]
    save_file({**stored, "more": torch.zeros(99)}, folder / "model.safetensors")


def twice(folder: Path) -> None:
    stored = weights(folder)
    torch.save({"model": stored, "ema": stored}, folder / "pytorch_model.bin")


def latest(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "latest").write_text(text)

    return change


def planted_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(folder.parent / "mark")))


@pytest.mark.parametrize(
    ("harm", "problem", "found"),
    [
        (far, "is damaged", "transformer.wte.weight has fewer numbers than its shape [257, 32] needs"),
        (other_config(n_layer=10**9), "does not fit its configuration", "28 tensors"),
        (other_config(vocab_size=10**11), "does not fit its configuration", "numbers in "),
        (other_config(n_embd=16), "does not fit its configuration", "the shape [257, 32]"),
        (other_config(architectures=["Trainer"]), "dray does not train this kind of model", "['Trainer']"),
        (other_config(n_embd="x"), "is damaged", "Error"),
        (linked, "a file of the checkpoint cannot be read", "a link to "),
        (piped, "a file of the checkpoint cannot be read", "a FIFO"),
        (cut, "is damaged", ""),
        (cut_torch, "the file cannot be read", ""),
        (sharded(a="../../x"), "is damaged", "'../../x' is not a file of this folder"),
        (sharded(a="a.safetensors"), "is damaged", "a is in none of its files"),
        (lost, "does not fit its configuration", "tensors such as "),
        (twice, "more than once", "ema., model."),
        (latest("../.."), "is damaged", "'../..', which is not a folder beside it"),
        (latest("global_step1"), "is damaged", "which is not a folder beside it"),
        (planted_index, "is damaged", ".metadata names posix.system"),
        (lambda folder: (folder / "config.json").unlink(), "does not say which model", "weights alone"),
        (lambda folder: (folder / "config.json").write_text("[" * 99), "is damaged", "Error"),
        (lambda folder: (folder / "trainer_state.json").write_text('{"global_step": -1}'), "is damaged", "-1"),
    ],
)  # fmt: skip
def test_what_is_refused(source: Path, harm: Callable[[Path], None], problem: str, found: str) -> None:
    harm(source)
    if harm is not far:
        (source / "optimizer.pt").unlink()
    with pytest.raises(ConfigError) as refused:
        take(source)
    assert problem in refused.value.problem, refused.value
    assert found in refused.value.details["found"]
    assert refused.value.details["fix"]
    assert not (source.parent / "model").exists()
    assert not (source.parent / "mark").exists()


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        torch.save(change(state) or state, folder / "optimizer.pt")

    return made


@pytest.mark.parametrize(
    ("harm", "words", "problem"),
    [
        (lambda folder: (folder / "optimizer.pt").unlink(), (), "a run cannot resume from this checkpoint"),
        (changed(lambda state: state["state"][0].update(exp_avg=torch.zeros(3))), (), "is damaged"),
        (changed(lambda state: state["state"].pop(3) and None), (), "is damaged"),
        (changed(lambda state: state["state"][0].update(step=torch.tensor(9.0))), (), "is damaged"),
        (changed(lambda state: {"param_groups": 1}), (), "is damaged"),
        (changed(lambda state: [state]), (), "is damaged"),
        (changed(lambda state: state["param_groups"][0].update(params=[[1]] * 10)), (), "is damaged"),
        (lambda folder: None, ("model.config.n_layer=1",), "is damaged"),
        (lambda folder: None, ("model.config.n_embd=16",), "is damaged"),
        (lambda folder: (folder / "trainer_state.json").write_text('{"global_step": 9}'), (), "not a step of the"),
        (lambda folder: (folder / "trainer_state.json").write_text('{"global_step": 0}'), (), "not a step of the"),
    ],
)  # fmt: skip
def test_what_is_not_resumed(source: Path, harm: Callable[[Path], None], words: tuple[str, ...], problem: str) -> None:
    harm(source)
    with pytest.raises(ConfigError) as refused:
        take(source, resume=True, words=words)
    assert problem in refused.value.problem, refused.value
    assert refused.value.details["fix"]
    assert not (source.parent / "kept").exists()


@pytest.mark.parametrize(
    ("made", "found", "fix"),
    [
        ((), "an empty folder", "name another folder"),
        (("checkpoint-5/", "checkpoint-40/"), "checkpoint-40, checkpoint-5", "name one of them: {}/checkpoint-40"),
        (("adapter_config.json",), "a LoRA adapter alone", "merge it with peft"),
        (("manifest.json", "rank-0.safetensors"), "a checkpoint of dray's own", "dray export RUN"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, made: tuple[str, ...], found: str, fix: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in made:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).touch()
    with pytest.raises(ConfigError) as refused:
        take(folder)
    assert refused.value.details["found"] == found
    assert fix.format(folder) in refused.value.details["fix"]


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (("{}",), "there is nothing to write: neither --to nor a recipe was given", "--to FOLDER"),
        (("{}/none", "--to", "{}/x"), "the checkpoint does not exist", "give the path of its folder"),
        (("{}", "--to", "{}"), "the target exists already", "--to"),
        (("{}", "--to", "{}/x", "--config", "{}"), "--config names a folder without config.json", "--config FOLDER"),
        (("{}", "smoke-cpu"), "cannot resume from another program's checkpoint", "checkpoint.folder=FOLDER"),
        (("{}", "smoke-cpu", "checkpoint.folder={}", "lora.enabled=true"), "cannot resume", "lora.enabled=false"),
        (("{}", "smoke-cpu", "checkpoint.folder={}/kept"), "the folder has checkpoints already", "ANOTHER"),
    ],
)
def test_what_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], problem: str, fix: str
) -> None:
    (tmp_path / "kept" / "step-3").mkdir(parents=True)
    ended = CliRunner().invoke(checkpoint.app, ["import", *(word.format(tmp_path) for word in words)])
    assert isinstance(ended.exception, ConfigError), ended.output
    assert problem in ended.exception.problem
    assert fix in ended.exception.details["fix"]
