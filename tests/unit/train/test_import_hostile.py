"""`dray model import` of what is no checkpoint, of another model, damaged, or made to harm who imports it."""

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

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

from dray import cli  # noqa: E402
from dray.contract.findings import ConfigError  # noqa: E402
from dray.contract.trainer.image_tasks import Importing  # noqa: E402
from dray.runs.prepare import read_recipe  # noqa: E402
from dray.train.outputs import importing  # noqa: E402
from helpers import ROOT  # noqa: E402
from trainings import GPT  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.hostile("checkpoints of others")]
NAME = "transformer.wte.weight"


class Act:
    """What calls this when it is unpickled."""

    def __init__(self, act: Callable[..., Any], *arguments: Any) -> None:
        self.act, self.arguments = act, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.act, self.arguments


class Planted(Act):
    def __init__(self, mark: Path) -> None:
        super().__init__(os.system, f"touch '{mark}'")


def network() -> GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 257}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=256, eos_token_id=256))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (folder / "model.safetensors").unlink(missing_ok=True)
    return {name: one.clone() for name, one in network().state_dict().items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """As Trainer leaves its weights after one step."""
    folder = tmp_path / "checkpoint-1"
    network().save_pretrained(folder)
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    return folder


def save(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda states: None) -> Path:
    """By torch's DCP, with AdamW's state after one step; `change` has the states, by the names of the weights."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters())
    net(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long()).loss.backward()
    optimizer.step()
    model, state = get_state_dict(net, optimizer)
    change(state["state"])
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    return folder


def take(
    source: Path, *, resume: bool = False, trust: bool = False, config: str = "", words: tuple[str, ...] = ()
) -> None:
    folder, settings = source.parent, {}
    if resume:
        words = (f"checkpoint.folder={folder}/kept", f"data.cache_dir={folder}/tokens", "train.steps=5", *words)
        settings = read_recipe(ROOT / "tests" / "tiny.toml", [*GPT, *words]).model_dump(mode="json")
    target = "" if resume else str(folder / "model")
    importing.run(Importing(str(source), target, settings, "", None, "auto", trust))


def test_the_plain_one_is_taken(source: Path) -> None:
    take(source)
    take(save(source.parent / "step_1"), resume=True)
    assert (source.parent / "kept" / "step-1" / "manifest.json").exists()


def test_a_planted_pickle_runs_only_where_it_is_trusted(source: Path) -> None:
    mark = source.parent / "mark"
    torch.save(weights(source) | {"x": Planted(mark)}, source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="the file is a pickle that would run code") as refused:
        take(source)
    assert refused.value.details["found"] == "the global posix.system"
    assert refused.value.details["fix"].startswith("--trust, ")
    assert not mark.exists()
    take(source, trust=True)
    assert mark.exists()


def test_a_trusted_file_may_need_a_package_that_is_missing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "theirs", ModuleType("theirs"))
        patched.setattr(sys.modules["theirs"], "Log", type("Log", (), {"__module__": "theirs"}), raising=False)
        torch.save(weights(source) | {"log": sys.modules["theirs"].Log()}, source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="needs a Python package that is missing") as refused:
        take(source, trust=True)
    assert refused.value.details["found"] == "No module named 'theirs'"


def test_deepspeed_s_own_objects_are_not_needed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = type("Scaler", (), {"__module__": "deepspeed.scaler"})
    with monkeypatch.context() as patched:
        for name in ("deepspeed", "deepspeed.scaler"):
            patched.setitem(sys.modules, name, ModuleType(name))
        patched.setattr(sys.modules["deepspeed.scaler"], "Scaler", scaler, raising=False)
        torch.save(weights(source) | {"scaler": scaler()}, source / "pytorch_model.bin")
    take(source)


def other_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


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


def planted_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(folder.parent / "mark")))


@pytest.mark.parametrize(
    ("harm", "problem", "found"),
    [
        (other_config(n_embd=16), "is of another model", ""),
        (other_config(architectures=["Trainer"]), "dray does not train this kind of model", "Trainer"),
        (other_config(n_embd="x"), "is damaged", "Error"),
        (cut, "is damaged", ""),
        (cut_torch, "is damaged", ""),
        (sharded(a="b.safetensors"), "is damaged", "b.safetensors"),
        (lost, "is of another model", "names such as "),
        (twice, "more than once", "ema., model."),
        (planted_index, "is damaged", ".metadata names posix.system"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json", "transformers' Trainer"),
        (lambda folder: (folder / "config.json").write_text("[" * 99), "is damaged", "Error"),
    ],
)  # fmt: skip
def test_what_is_refused(source: Path, harm: Callable[[Path], None], problem: str, found: str) -> None:
    harm(source)
    with pytest.raises(ConfigError) as refused:
        take(source)
    assert problem in refused.value.problem, refused.value
    assert found in refused.value.details["found"]
    assert refused.value.details["fix"]
    assert not (source.parent / "model").exists()
    assert not (source.parent / "mark").exists()


@pytest.mark.parametrize("how", ["by value", "by name"])
def test_any_python_s_enumeration_is_read(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pythons differ in how they pickle its members, which are in DCP's index."""
    ways = {"by value": lambda one: (type(one), (one.value,)), "by name": lambda one: (getattr, (type(one), one.name))}
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda one, _: ways[how](one))
    take(save(tmp_path / "step_1"), resume=True)


@pytest.mark.parametrize("act", [exec, open, getattr, torch.load])
def test_a_planted_index_runs_nothing(tmp_path: Path, act: Any) -> None:
    folder, mark = save(tmp_path / "step_1"), tmp_path / "mark"
    arguments = {exec: (f"open({str(mark)!r}, 'w')",), open: (str(mark), "w")}
    (folder / ".metadata").write_bytes(pickle.dumps(Act(act, *arguments.get(act, (str(mark), "x")))))
    with pytest.raises(ConfigError, match="the checkpoint is damaged"):
        take(folder, resume=True)
    assert not mark.exists()


def test_planted_numbers_run_nothing(tmp_path: Path) -> None:
    """torch.save's file in place of a tensor, of the length that the index has."""
    folder, mark = save(tmp_path / "step_1"), tmp_path / "mark"
    file = next(folder.glob("*.distcp"))
    size = file.stat().st_size
    torch.save(Planted(mark), file)
    file.write_bytes(file.read_bytes().ljust(size, b"\0")[:size])
    with pytest.raises(ConfigError, match="the checkpoint is damaged"):
        take(folder, resume=True)
    assert not mark.exists()


def every_step(number: float) -> Callable[[dict[str, Any]], None]:
    return lambda states: [state.update(step=torch.tensor(number)) for state in states.values()] and None


@pytest.mark.parametrize(
    ("change", "words", "problem"),
    [
        (lambda states: states.clear(), (), "a run cannot resume from this checkpoint"),
        (lambda states: states[NAME].update(exp_avg=torch.zeros(3)), (), "is of another model"),
        (lambda states: states[NAME].pop("exp_avg"), (), "is of another model"),
        (lambda states: states[NAME].update(step=torch.tensor(9.0)), (), "is damaged"),
        (lambda states: None, ("model.config.n_layer=3",), "is of another model"),
        (lambda states: None, ("model.config.n_embd=16",), "is of another model"),
        (every_step(9.0), (), "not a step of the"),
        (every_step(0.0), (), "not a step of the"),
    ],
)
def test_what_is_not_resumed(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        take(save(tmp_path / "step_1", change), resume=True, words=words)
    assert problem in refused.value.problem, refused.value
    assert refused.value.details["fix"]
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((), "an empty folder"),
        (("checkpoint-5", "checkpoint-40"), "checkpoint-40, checkpoint-5"),
        (("manifest.json", "rank-0.safetensors"), "manifest.json, rank-0.safetensors"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, names: tuple[str, ...], found: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(ConfigError, match="there is no checkpoint that can be imported") as refused:
        take(folder)
    assert refused.value.details["found"] == found
    assert refused.value.details["fix"] == "name another folder; for a run of dray: dray model export RUN"


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (("{}",), "there is nothing to write: neither --to nor a recipe was given", "--to FOLDER"),
        (("{}/none", "--to", "{}/x"), "the checkpoint does not exist", "give the path of its folder"),
        (("{}", "--to", "{}"), "the target exists already", "--to"),
        (("{}", "smoke-cpu"), "cannot resume from another program's checkpoint", "checkpoint.folder=FOLDER"),
        (("{}", "smoke-cpu", "checkpoint.folder={}", "lora.enabled=true"), "cannot resume", "lora.enabled=false"),
        (("{}", "smoke-cpu", "checkpoint.folder={}/kept"), "cannot resume", "ANOTHER"),
    ],
)
def test_what_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str, fix: str
) -> None:
    (tmp_path / "kept" / "step-3").mkdir(parents=True)
    assert cli._code(["model", "import", *(word.format(tmp_path) for word in words)]) == 78
    said = capsys.readouterr().err
    assert problem in said
    assert fix in said
