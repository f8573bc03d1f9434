"""The trainer's parts, where a whole run would not tell them apart."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.train import corpus, data, model  # noqa: E402
from dray.train.config import Config  # noqa: E402

pytestmark = pytest.mark.torch

CONFIG = Config(
    folder="/r", name_variable="N", variant="cpu", world_size=1, global_size=1,
    per_device=1, accumulation=1, text="builtin", validation_percent=5,
    block=16, model_type="gpt2", model_config={"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16}, steps=1,
    lr=1e-3, warmup_steps=0, schedule="constant", weight_decay=0.0, precision="fp32", seed=1, log_every=1,
    clip=1.0, strategy="ddp", offload="", compile=False, every=(), keep=2, cache="", about={},
)  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], does: object, *words: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        does(*words)
    assert stopped.value.code == 78
    return capsys.readouterr().err


def test_the_corpus_has_the_same_bytes_everywhere() -> None:
    text = "\n".join(corpus.documents())
    assert text.startswith("one: the guard watches the white crate through the night. two: ")
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "b6db2b02366c8f1323b9fa0a5fe0067fd0591028ad2431800e4d38cbe7fa6288"


@pytest.mark.parametrize("text", ["the crane", "é 漢字 🚢 \t\r\n", "<|endoftext", ""])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokens = data.tokenizer()
    ids = tokens(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokens.decode(ids) == text


def splits(cache: Path, **changes: object):
    return data.splits(replace(CONFIG, cache=str(cache), **changes), data.tokenizer(), print)


def test_no_token_is_lost(tmp_path: Path) -> None:
    texts = list(corpus.documents())
    for tokens, part in zip(splits(tmp_path), (texts[:570], texts[570:]), strict=True):
        assert len(tokens.ids) == sum(len(text.encode()) + 1 for text in part)
        assert len(tokens.starts) == len(part) + 1


def test_a_text_file_is_one_document_a_line(tmp_path: Path) -> None:
    text = tmp_path / "my text.txt"
    text.write_text("".join(f"line {number} is here\n\n" for number in range(40)))
    training, _ = splits(tmp_path / "cache", text=str(text))
    assert data.tokenizer().decode(training.ids.tolist()).startswith("line 0 is here<|endoftext|>line 1 is here")


def test_texts_that_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 100)
    said = {
        name: refused(capsys, lambda name=name: splits(tmp_path / "c", text=str(tmp_path / name))).splitlines()[0]
        for name in ("gone", "empty", "latin")
    }
    assert said == {
        "gone": "the text cannot be read",
        "empty": "the training text is too short",
        "latin": "the text is not UTF-8",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt9"}, "transformers knows no model type 'gpt9'"),
        ({"model_config": {"n_layers": 1}}, "a gpt2 configuration has no 'n_layers'"),
        ({"block": 32}, "a block is longer than the model's positions"),
    ],
)
def test_models_that_are_not(changes: dict, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, model.build, replace(CONFIG, **changes), data.tokenizer()).splitlines()[0] == message
