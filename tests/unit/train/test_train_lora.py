"""LoRA: the model's own weights stay, and what is learnt beside them is in the end part of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from trainings import GPT, ROOT, Run  # noqa: E402

HERE = bool(find_spec("deepspeed") and find_spec("peft"))
pytestmark = [pytest.mark.torch] if HERE else [pytest.mark.torch, pytest.mark.docker_image]
LLAMA = (
    "model.type=llama",
    *(f"model.config.{name}={value}" for name, value in (
        ("num_hidden_layers", 2), ("hidden_size", 32), ("intermediate_size", 64), ("num_attention_heads", 4),
        ("num_key_value_heads", 2), ("max_position_embeddings", 64),
    )),
)  # fmt: skip
LORA = ("lora.rank=4", "lora.alpha=8", "train.lr=0.05")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("my runs")


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Run]:
    """Runs where peft and DeepSpeed are: here, or in the image, which sees this folder alone."""
    forks = request.getfixturevalue("forks" if HERE else "image_forks")
    count = iter(range(1000))
    shutil.copy(ROOT / "recipes" / "tiny" / "chats.jsonl", folder)

    def begun(ranks: int, *words: str, model: tuple[str, ...] = LLAMA, steps: int = 10) -> Run:
        return Run(forks, folder / f"run-{next(count)}", ranks, *words, model=model, steps=f"steps={steps}")

    return begun


def chats(folder: Path) -> tuple[str, ...]:
    said = ("train.objective=sft", "data.column=messages", "data.document_mask=true")
    return (*said, f"data.train={folder}/chats.jsonl", "data.validation_split_percentage=20")


@pytest.mark.slow
def test_all_strategies_learn_the_same(run, folder) -> None:
    told = run(1, *chats(folder), *LORA).end()
    assert told.losses()[-1] < told.losses()[0] - 0.15
    for way in ("ddp", "fsdp", "zero2", "zero3"):
        other = run(2, *chats(folder), *LORA, f"train.strategy={way}").end()
        assert other.losses() == pytest.approx(told.losses(), rel=1e-3), way
        for name, weight in told.weights().items():
            assert torch.allclose(weight, other.weights()[name], rtol=1e-2, atol=2e-3), (way, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_the_models_own_weights_stay_and_the_sum_is_saved(run) -> None:
    base = run(1, steps=2, model=GPT).end()
    given = (f"model.name={base.folder}/checkpoints/final", *LORA)
    ended = run(2, *given, model=()).end()
    (start,) = ended.events("start")
    # 4 x (in + out) for each of c_attn, c_proj, c_fc and c_proj in two layers.
    assert start["trainable_parameters"] == 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))
    before, after = base.weights(), ended.weights()
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {
        f"transformer.h.{layer}.{name}.weight"
        for layer in (0, 1) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }  # fmt: skip
    if HERE:  # peft's own sum is the same
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        network = AutoModelForCausalLM.from_pretrained(base.folder / "checkpoints" / "final")
        theirs = PeftModel.from_pretrained(network, ended.folder / "checkpoints" / "adapter").merge_and_unload()
        for name, weight in theirs.state_dict().items():
            if name in after:
                assert torch.allclose(weight, after[name], atol=1e-6), name


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_same_and_its_checkpoints_are_small(run, folder) -> None:
    whole = run(2, *chats(folder), *LORA, "lora.dropout=0.1").end()
    kept = folder / "kept"
    said = (*chats(folder), *LORA, "lora.dropout=0.1", f"checkpoint.folder={kept}", "checkpoint.every=5")
    cut = run(2, *said).end()
    shutil.rmtree(kept / "step-10")
    again = run(1, *said).end()
    assert again.events("start")[0]["first_step"] == 5
    assert cut.losses() == whole.losses()
    assert again.losses()[-1] == pytest.approx(whole.losses()[-1], rel=0.05)  # another number of ranks drops others
    shutil.rmtree(kept / "step-10")
    assert run(2, *said).end().losses() == whole.losses()[5:]
    held = json.loads((kept / "step-5" / "manifest.json").read_text())["tensors"]
    assert all(".lora_" in name for name in held)
    assert len(held) == 3 * 2 * 2 * 7  # a weight and two averages, of two matrices at seven layers of two blocks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (('lora.target_modules=["q_prox"]',), "lora.target_modules names layers that the model lacks"),
        (('lora.target_modules=["proj"]',), "ends of layer names, such as down_proj, gate_proj"),
        (("data.column=text",), "there is no column 'text'"),
        (("data.answer_column=answer",), "there is no column 'answer'"),
    ],
)
def test_what_cannot_be_is_said(run, folder, words: tuple[str, ...], said: str) -> None:
    assert said in run(1, *chats(folder), "lora.rank=2", *words).end(78).said()


@pytest.mark.slow
def test_some_layers_and_16_bits(run, folder) -> None:
    some = run(
        2, *chats(folder), *LORA, 'lora.target_modules=["q_proj", "v_proj"]', "model.dtype=bf16", "train.precision=bf16"
    )
    (start,) = some.end().events("start")
    assert start["trainable_parameters"] == 2 * 4 * ((32 + 32) + (32 + 16))
    assert {weight.dtype for weight in some.weights().values()} == {torch.bfloat16}
    assert some.losses()[-1] < some.losses()[0] - 0.1
