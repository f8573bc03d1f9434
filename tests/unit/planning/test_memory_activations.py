"""Activations: the formula, for a machine without torch, beside what the models themselves keep, counted by hooks."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dray.config.training import Lora
from dray.planning.estimates import activations, memory, model_shape
from dray.runs.prepare import read_recipe
from helpers import ROOT

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")]

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 256, "n_head": 4, "n_layer": 4, "n_positions": 2048},
    "llama": {"num_key_value_heads": 4},
    "opt": {"ffn_dim": 1024, "word_embed_proj_dim": 256},
    "gpt_neo": {"num_heads": 4, "num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "bert": {"intermediate_size": 1024},
    "qwen2": {"num_key_value_heads": 2, "intermediate_size": 640},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 256},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 64},
}
SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768,
    "max_position_embeddings": 2048, "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
# How strategies compute: ddp under autocast, fsdp with 16-bit weights under it, DeepSpeed without it, and 32 bits.
WAYS = {"ddp": ("bf16", "fp32"), "fsdp": ("bf16", "bf16"), "zero": ("", "bf16"), "fp32": ("", "fp32")}


def configuration(kind: str, **more: object) -> dict[str, Any]:
    own = MODELS[kind]
    known = {key: value for key, value in SIZES.items() if kind != "gpt2" or key == "vocab_size"}
    norms = {"rms_norm_eps": 1e-6} if "num_key_value_heads" in own else {}
    return {"model_type": kind, **known, **own, **norms, **more}


def both(raw: dict[str, Any], length: int, way: str, **more: Any) -> tuple[dict[str, int], dict[str, float]]:
    """What the hooks count, and the formula."""
    import counted_activations
    from counted_activations import Question, main

    autocast, weights = WAYS[way]
    eager = bool(more.get("attention"))
    question = Question(configuration=raw, length=length, autocast=autocast, weights=weights,
                        masked=raw["model_type"] == "bert", **more)  # fmt: skip
    if more.get(
        "documents"
    ):  # a test before may have loaded a model that masks none, which is told to the whole process
        argv = [sys.executable, counted_activations.__file__, json.dumps(dataclasses.asdict(question))]
        found = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    else:
        found = main(question)
    found = {name: found[name] for name in ("kept", "checkpointed")}
    shape = model_shape.of(raw)
    assert shape
    formula = {
        name: activations.kept(shape, activations.Use(
            length, products=2 if autocast or weights == "bf16" else 4, residual=2 if weights == "bf16" else 4,
            autocast=bool(autocast), checkpointed=name == "checkpointed", eager=eager,
            masked=bool(more.get("documents")),
        ))
        for name in ("kept", "checkpointed")
    }  # fmt: skip
    return found, formula


def of_ways() -> Iterator[object]:
    """Each model in one way, and two in all: the others on their day."""
    for kind in MODELS:
        for way in WAYS:
            marks = () if way == "ddp" or kind in ("gpt2", "llama") else pytest.mark.slow
            yield pytest.param(kind, way, id=f"{kind}-{way}", marks=marks)


@pytest.mark.seconds
@pytest.mark.parametrize(("kind", "way"), [*of_ways()])
def test_the_formula_is_what_the_model_keeps(kind: str, way: str) -> None:
    """To 15 %; the old one, of 34 bytes, was off by half."""
    for length in (128, 1024):
        counted, formula = both(configuration(kind), length, way)
        assert formula == pytest.approx(counted, rel=0.15), (kind, way, length)


def _auto(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(kind))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_the_formula_has_the_mask_that_hides_other_documents(kind: str) -> None:
    """SDPA makes a bias of it, in each layer: at 4,096 tokens a tenth of all, and heads are expanded beside it."""
    raw = configuration(kind, **({"n_positions": 4096} if kind == "gpt2" else {"max_position_embeddings": 4096}))
    plain, _ = both(raw, 4096, "ddp")
    counted, formula = both(raw, 4096, "ddp", documents=True)
    assert formula == pytest.approx(counted, rel=0.15)
    assert counted["kept"] > 1.1 * plain["kept"]
    # On GPUs flex attention hides them, in all models but GPT-2.
    recipe = read_recipe(ROOT / "tests" / "tiny.toml", ["train.steps=9", "data.document_mask=true"])
    shape = model_shape.of(raw)
    assert shape
    flex = kind not in model_shape.WITHOUT_FLEX
    assert memory.use(recipe, kind).masked == (kind == "gpt2")
    assert flex == _auto(kind)._supports_flex_attn


def parameters(raw: dict[str, Any], **more: Any) -> dict[str, int]:
    from counted_activations import Question, main

    masked = raw["model_type"] == "bert"
    found = main(Question(configuration=raw, length=16, masked=masked, **more))
    return {name: found[name] for name in ("parameters", "outside", "trained")}


@pytest.mark.seconds
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tied", [None, True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_formula_has_the_model_s_parameters(kind: str, tied: bool | None) -> None:
    """To the last one, norms and biases too. A tied one counts once."""
    raw = configuration(kind) | ({} if tied is None else {"tie_word_embeddings": tied})
    counted, shape = parameters(raw), model_shape.of(raw)
    assert shape
    assert (shape.parameters, shape.outside) == (counted["parameters"], counted["outside"])
    assert counted["trained"] == counted["parameters"]
    if tied is not None:
        other = parameters(raw | {"tie_word_embeddings": not tied})
        bias = 1000 if kind == "bert" else 0
        assert abs(other["parameters"] - counted["parameters"]) == 1000 * 256 + bias


@pytest.mark.seconds
@pytest.mark.parametrize("kind", MODELS)
def test_the_formula_has_lora_s_parameters(kind: str) -> None:
    raw, lora = configuration(kind), Lora(rank=4)
    counted, shape = parameters(raw, lora=lora.model_dump()), model_shape.of(raw)
    assert shape
    assert counted["parameters"] == parameters(raw)["parameters"]
    head = 2 * 256 if kind == "bert" else 0  # a linear layer before its head, which the formula leaves out
    assert lora.rank * (shape.linear * shape.layers + head) == counted["trained"]
    some = parameters(raw, lora=Lora(rank=8, target_modules=(_linear(kind),)).model_dump())
    assert 0 < some["trained"] < 2 * counted["trained"]


def _linear(kind: str) -> str:
    return {"gpt2": "c_attn", "bert": "query"}.get(kind, "q_proj")


@pytest.mark.seconds
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("multiple", [1, 128, 384])
def test_the_formula_has_the_rows_of_a_padded_vocabulary(kind: str, multiple: int) -> None:
    """The head multiplies with a copy that has more rows; no parameter is added."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    from dray.train.objectives.base import LossModule

    raw, words = configuration(kind), [f"model.pad_to_multiple_of={multiple}"]
    with torch.device("meta"):
        auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
        network = auto.from_config(AutoConfig.for_model(**raw))
        weight, bias = LossModule(network, multiple=multiple).padded_head()
    shape = model_shape.of(raw)
    assert shape
    recipe = read_recipe(ROOT / "tests" / "tiny.toml", ["train.steps=9", *words])
    assert [*weight.shape] == [memory.padded(recipe, shape), shape.hidden]
    assert bias is None or len(bias) == memory.padded(recipe, shape)
    assert sum(one.numel() for one in network.parameters()) == parameters(raw)["parameters"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_attention_that_keeps_its_scores(kind: str) -> None:
    dropouts = {"attn_pdrop": 0.0} if kind == "gpt2" else {"attention_dropout": 0.0}
    counted, formula = both(configuration(kind, **dropouts), 1024, "ddp", attention="eager")
    assert formula == pytest.approx(counted, rel=0.15)


@pytest.mark.seconds
def test_the_figures_of_the_common_models() -> None:
    """Bytes a token, layer and hidden unit with an inner size of four: GPT-2 86, Llama 66, 56 without autocast."""
    from counted_activations import Question, main

    def layer(kind: str, way: str, **more: object) -> float:
        autocast, weights = WAYS[way]
        sizes = {
            key: value for key, value in configuration(kind).items() if key not in ("n_layer", "num_hidden_layers")
        }
        name = "n_layer" if kind == "gpt2" else "num_hidden_layers"
        two, four = (
            main(Question(configuration={**sizes, name: count, **more}, length=512, autocast=autocast, weights=weights))
            for count in (2, 4)
        )
        return round((four["kept"] - two["kept"]) / (2 * 512 * 256))

    assert layer("gpt2", "ddp") == 86  # with the masks of two dropouts
    assert layer("gpt2", "ddp", resid_pdrop=0.0) == 84
    assert layer("llama", "ddp", intermediate_size=1024) == 66
    assert layer("llama", "zero", intermediate_size=1024) == 56
