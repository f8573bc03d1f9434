"""What rank 0 measures and writes into metrics.jsonl, without a run around it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM  # noqa: E402

from dray.train.config import Config  # noqa: E402
from dray.train.loop import metrics as module  # noqa: E402
from dray.train.loop.metrics import Metrics, Speed, flops_per_token  # noqa: E402

pytestmark = pytest.mark.torch
NAN, INF = float("nan"), float("inf")


def test_what_is_not_finite_is_null_also_in_a_list(tmp_path: Path) -> None:
    """A score of fp16 that overflows, which a run only observes."""
    config: Any = SimpleNamespace(folder=tmp_path, train=SimpleNamespace(trackers=()))
    told = {"loss": NAN, "attention_max": [1.5, INF, NAN], "shares": {"web": -INF, "code": 0.5}, "step": 7}
    metrics: Any = Metrics(config, writes=True)
    with metrics._file:
        metrics.write("step", "", **told)
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert found.pop("time")
    assert found == {
        "event": "step", "loss": None, "attention_max": [1.5, None, None], "shares": {"web": None, "code": 0.5},
        "step": 7,
    }  # fmt: skip


def test_an_evaluation_counts_as_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module, "flops_per_token", lambda *_: 1.0)
    config: Any = SimpleNamespace(step_tokens=1000, global_size=8, steps=100, train=SimpleNamespace(precision="bf16"))
    strategy: Any = SimpleNamespace(device=torch.device("cpu"), network=None)
    speed = Speed(config, strategy)
    speed.begin(5)
    with speed.spent("evaluation"):
        now = 60.0
    now = 62.0
    figures = speed.measured(7)
    assert (figures["tokens_per_s"], figures["step_s"]) == (1000.0, 1.0)


def test_mfu_counts_the_rows_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of 16 tokens a row and one of 32, in 4 seconds; a token costs as many FLOPs as its row is long."""
    times = iter([0.0, 4.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(module, "flops_per_token", lambda _network, _config, length: length)
    monkeypatch.setattr(module, "_peak", lambda *_: 1e6)
    config = object.__new__(Config)
    train = SimpleNamespace(precision="bf16", sequence_length_warmup=((3, 16),))
    vars(config).update(global_size=32, steps=4, train=train, data=SimpleNamespace(sequence_length=32))
    strategy: Any = SimpleNamespace(device=torch.device("cpu"), network=None)
    speed = Speed(config, strategy)
    speed.begin(0)
    assert speed.measured(4)["mfu"] == round(32 * 32 * 20 / 1e6, 4)


V, H, T = 100, 64, 32
SETTINGS = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": 2}
MLP = {"intermediate_size": 96, "moe_intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32}
ATTENTION = 12 * 2 * T  # by the width of all heads


def flops(kind: str, objective: str = "causal", frozen: str = "", **settings: Any) -> tuple[float, dict[str, int]]:
    """FLOPs of each token, and the sizes of the weights."""
    heads = {} if kind == "mamba" else {"num_attention_heads": 4}
    made = AutoConfig.for_model(kind, **SETTINGS, **heads, **settings)
    torch.manual_seed(0)
    network = (AutoModelForMaskedLM if objective == "masked" else AutoModelForCausalLM).from_config(made)
    for name, weight in network.named_parameters():
        weight.requires_grad_(not frozen or frozen not in name)
    train = SimpleNamespace(objective=objective, mlm_probability=0.15)
    config: Any = SimpleNamespace(train=train)
    return flops_per_token(network, config, T), {name: weight.numel() for name, weight in network.named_parameters()}


def test_the_width_of_heads_counts_and_not_hidden_size() -> None:
    """Qwen3's heads are wider together than its hidden size; an input embedding is looked up, and not multiplied."""
    for tied in (False, True):
        counted, sizes = flops("qwen3", tie_word_embeddings=tied, **MLP)
        table = 0 if tied else V * H
        assert counted == 6 * (sum(sizes.values()) - table) + ATTENTION * 4 * 32


def test_frozen_weights_have_no_gradient() -> None:
    counted, sizes = flops("llama", frozen="mlp", tie_word_embeddings=False)
    frozen = sum(size for name, size in sizes.items() if "mlp" in name)
    assert counted == 6 * (sum(sizes.values()) - V * H) - 2 * frozen + ATTENTION * H
    counted, sizes = flops("llama", frozen="embed_tokens", tie_word_embeddings=False)
    assert counted == 6 * (sum(sizes.values()) - V * H) + ATTENTION * H


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("mixtral", {"num_local_experts": 8}), ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2})],
)
def test_of_experts_those_count_that_a_token_meets(kind: str, settings: dict[str, int]) -> None:
    counted, sizes = flops(kind, tie_word_embeddings=False, **MLP, **settings)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts > 0
    assert counted == 6 * (sum(sizes.values()) - V * H - experts * 6 / 8) + ATTENTION * 4 * 32


def test_gemma_s_configuration_has_another_name_for_them() -> None:
    """Without it a run of such a model ended in an AttributeError before its first step."""
    layers = {"layer_types": ["full_attention"] * 2, "hidden_size_per_layer_input": 0}
    experts = {"num_experts": 8, "top_k_experts": 2, "enable_moe_block": True}
    few, sizes = flops("gemma4_text", **MLP, **layers, **experts)
    every, _ = flops("gemma4_text", **MLP, **layers, **experts | {"top_k_experts": 8})
    assert every - few == 6 * sum(size for name, size in sizes.items() if ".experts." in name) * 6 / 8


def test_masked_tokens_alone_pass_the_head() -> None:
    counted, sizes = flops("bert", "masked", intermediate_size=96)
    rest = sum(sizes.values()) - V * H
    assert counted == pytest.approx(6 * (rest + 0.15 * V * H) + ATTENTION * H)


def test_a_model_without_attention() -> None:
    """Mamba's configuration names no heads, and ties its embeddings."""
    counted, sizes = flops("mamba")
    assert counted == 6 * sum(sizes.values())
