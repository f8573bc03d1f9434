"""The model at a run's end: its files, their precision, and what a kill leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from dray.train.outputs import export  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


def written(folder: Path, limit: int, dtype: torch.dtype | None = None) -> dict[str, list[str]]:
    """Three tensors of 16 bytes that share a storage."""
    folder.mkdir()
    values = torch.arange(12.0)
    weights = ((name, part) for name, part in zip("abc", values.split(4), strict=True))
    export.write_weights(folder, weights, dtype, limit=limit)
    return {path.name: sorted(load_file(path)) for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_names_are_those_that_transformers_saves(tmp_path: Path, kind: str) -> None:
    """In memory a layer's experts are one tensor; other programs read each by its own name."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    experts = {"num_local_experts": 4} if kind == "mixtral" else {}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **experts))
    network.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    weights = ((name, weight.detach()) for name, weight in network.named_parameters())
    found = dict(export.named_as_saved(network, weights))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        (48, {"model.safetensors": ["a", "b", "c"]}),
        (47, {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}),
        (1, {f"model-0000{number}-of-00003.safetensors": [name] for number, name in enumerate("abc", 1)}),
    ],
)
def test_no_file_is_larger_unless_of_one_tensor(tmp_path: Path, limit: int, files: dict[str, list[str]]) -> None:
    assert written(tmp_path / "model", limit) == files
    index = tmp_path / "model" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        assert json.loads(index.read_text()) == {"metadata": {"total_size": 48}, "weight_map": places}


def test_the_size_is_that_of_the_written_type(tmp_path: Path) -> None:
    assert written(tmp_path / "model", 24, torch.bfloat16) == {"model.safetensors": ["a", "b", "c"]}
    assert load_file(tmp_path / "model" / "model.safetensors")["c"].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_swap_that_is_killed_leaves_a_model(tmp_path: Path, renames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    part, final = tmp_path / "final.part", tmp_path / "final"
    for folder, text in ((part, "new"), (final, "old")):
        folder.mkdir()
        (folder / "config.json").write_text(text)
    rename, done = Path.rename, []

    def killed(path: Path, target: Path) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        if renames < 2:
            with pytest.raises(KeyboardInterrupt):
                export.swap(part, final)
        else:
            export.swap(part, final)
    export.recover(final)
    assert (final / "config.json").read_text() == ("new" if renames == 2 else "old")
    assert not (tmp_path / "final.old").exists()


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_a_16_bit_run_saves_16_bits(forks: Forks, tmp_path: Path, strategy: str) -> None:
    """And all ranks end, and transformers loads what was saved."""
    run = Run(forks, tmp_path / "run", 2, "train.precision=bf16", f"train.strategy={strategy}", steps="steps=5").end()
    assert {weight.dtype for weight in run.weights().values()} == {torch.bfloat16}
    network = AutoModelForCausalLM.from_pretrained(run.paths.final_model)
    assert (network.dtype, network.config.architectures) == (torch.bfloat16, ["GPT2LMHeadModel"])
    assert json.loads((run.paths.final_model / "config.json").read_text())["dtype"] == "bfloat16"
    assert run.events("end")
