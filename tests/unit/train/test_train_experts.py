"""Models with experts: their routers' loss, and the same losses on any ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from torch.nn import functional  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from dray.contract.findings import ConfigError  # noqa: E402
from dray.train.loop.metrics import flops_per_token  # noqa: E402
from dray.train.model.router_loss import router_losses  # noqa: E402
from dray.train.objectives.base import LossModule  # noqa: E402
from trainings import Forks, Run, config  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32,
         "router_aux_loss_coef": 0.1, "num_experts_per_tok": 2}  # fmt: skip
MODELS = {
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
}


def network(kind: str):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind])).train()


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_routers_loss_of_a_row_is_that_of_transformers(kind: str, loss: str) -> None:
    """And of several rows their sum: the ranks may have any of them."""
    model, rows = network(kind), torch.randint(0, 300, (3, 32), generator=torch.Generator().manual_seed(2))
    labels = rows.roll(-1, 1)
    labels[1, :20] = -100
    expected = 0.0
    for row, wanted in zip(rows[:, None], labels, strict=True):
        outputs = model(input_ids=row, output_router_logits=True)
        expected += functional.cross_entropy(outputs.logits[0], wanted, reduction="sum")
        expected += 0.1 * outputs.aux_loss * (wanted != -100).sum()
    module = LossModule(model, loss)
    together, _ = module(rows, labels, None, None)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=0)
    together.backward()
    assert all(layer.mlp.gate.weight.grad.norm() > 0 for layer in model.model.layers)
    model.eval()
    with torch.no_grad():
        evaluated, _ = module(rows, labels, None, None)
    assert float(evaluated) < float(together.detach()) - 1, "an evaluation has no routers' loss"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3_moe", {**MODELS["qwen3_moe"], "mlp_only_layers": [0, 1]}),
        ("doge", SIZES),
        ("granitemoehybrid", {**SIZES, "num_local_experts": 0, "layer_types": ["attention"] * 2, "mamba_n_heads": 8}),
    ],
)
def test_a_dense_model_of_such_a_family_has_no_routers_loss(kind: str, settings: dict) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).train()
    rows = torch.zeros(1, 8, dtype=torch.long)
    assert float(LossModule(model)(rows, rows, None, None)[0].detach()) > 0


def test_router_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 x 4 tokens\n.*\(2, 8, 4\)"):
        router_losses([torch.zeros(8, 4), torch.zeros(2, 8, 4)], 2, 4, 2)


@pytest.mark.parametrize("kind", MODELS)
def test_flops_count_the_experts_that_a_token_meets(kind: str, tmp_path: Path) -> None:
    model, chosen = network(kind), config(tmp_path)
    weights = dict(model.named_parameters())
    experts = sum(weight.numel() for name, weight in weights.items() if ".experts." in name)
    others = sum(weight.numel() for weight in weights.values()) - experts - model.model.embed_tokens.weight.numel()
    attention = 12 * 2 * 4 * 8 * chosen.data.sequence_length
    assert flops_per_token(model, chosen, chosen.data.sequence_length) == 6 * (others + experts / 2) + attention


@pytest.fixture(scope="module")
def run(forks: Forks, tmp_path_factory) -> Callable[..., Run]:
    folder = tmp_path_factory.mktemp("my runs")
    model = ("model.type=mixtral", *(f"model.config.{name}={value}" for name, value in MODELS["mixtral"].items()))

    def begun(name: str, ranks: int, *words: str) -> Run:
        return Run(forks, folder / name, ranks, *words, model=model, steps="steps=4").end()

    return begun


@pytest.mark.slow
def test_the_losses_are_the_same_on_any_ranks(run) -> None:
    alone = run("one", 1).losses()
    for ranks, strategy in ((2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp")):
        other = run(f"{strategy}-{ranks}", ranks, f"train.strategy={strategy}").losses()
        assert other == pytest.approx(alone, rel=1e-4), (strategy, ranks)
