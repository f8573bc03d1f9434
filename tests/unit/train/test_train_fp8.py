"""Products of 8 bits: which layers have them, and which GPUs; with torchao a CPU emulates them."""

from __future__ import annotations

import logging
import re
import warnings
from importlib import import_module

import pytest
from conftest import ALL

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from dray.contract.findings import ConfigError  # noqa: E402
from dray.train.model import fp8  # noqa: E402
from helpers import ROOT  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LLAMA = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 32}  # fmt: skip
TORCHAO = ROOT / "build/torchao"
IMPORTS = f"import sys; sys.path.insert(0, {str(TORCHAO)!r})"  # the process that becomes ranks began without it


@pytest.fixture
def torchao(monkeypatch) -> None:
    """Let this process import torchao."""
    if not (TORCHAO / "fetched").exists() and not ALL:
        pytest.skip(f"there is no {TORCHAO} (make torch-versions)")
    monkeypatch.syspath_prepend(TORCHAO)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):  # of its docstrings
        import_module("torchao.float8")
    logging.disable(logging.NOTSET)


def network(kind: str = "llama", **settings: object):
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **(LLAMA if kind == "llama" else {}), **settings)
    )


@pytest.mark.parametrize(
    ("precision", "capability", "installed", "found"),
    [
        ("fp8", (8, 9), True, "NVIDIA X, of compute capability 8.9"),
        ("fp8_tensorwise", (8, 0), True, "NVIDIA X, of compute capability 8.0"),
        ("fp8", (9, 0), False, "torchao is not installed: dray image layer IMAGE --pip torchao"),
        ("fp8", (9, 0), True, "gpt2, which has no such layers (those of GPT-2 are Conv1D)"),
    ],
)
def test_where_they_are_not_possible(monkeypatch, precision: str, capability, installed: bool, found: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X")
    monkeypatch.setattr(fp8, "find_spec", lambda _: installed or None)
    with pytest.raises(ConfigError) as refused:
        fp8.convert(network("gpt2", n_layer=1), precision, GPU)
    finding = refused.value.finding
    assert (finding.found, finding.fix, finding.code) == (found, "train.precision=bf16", 78)


def test_a_model_that_is_evaluated_needs_none(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    model = network().requires_grad_(False)
    fp8.convert(model, "fp8", GPU)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_the_fetched_torchao_is_the_image_s() -> None:
    files = ("tests/torchao.lock", "containers/cuda/requirements.lock")
    fetched, image = (re.findall(r"^torchao==(\S+)", (ROOT / file).read_text(), re.MULTILINE) for file in files)
    assert fetched == image


@pytest.mark.usefixtures("torchao")
def test_all_linear_layers_but_the_head_have_them() -> None:
    model = network()
    fp8.convert(model, "fp8", CPU)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if hasattr(module, "in_features")}
    assert kinds.pop("lm_head") == "Linear"
    assert set(kinds.values()) == {"Float8Linear"}
    assert len(kinds) == 2 * 7


@pytest.mark.usefixtures("torchao")
@pytest.mark.slow
def test_the_losses_are_near_those_of_bf16_on_any_ranks(tmp_path, forks: Forks) -> None:
    model = ("model.type=llama", *(f"model.config.{name}={value}" for name, value in LLAMA.items()))

    def losses(ranks: int, *words: str) -> list[float]:
        folder = tmp_path / "-".join([str(ranks), *words]).replace("=", "-")
        return Run(forks, folder, ranks, *words, model=model, steps="steps=4", before=IMPORTS).end().losses()

    wanted = losses(1, "train.precision=bf16")
    for precision in ("fp8", "fp8_tensorwise"):
        alone = losses(1, f"train.precision={precision}")
        assert alone == pytest.approx(wanted, rel=1e-2)
        for strategy in ("ddp", "fsdp"):
            other = losses(2, f"train.precision={precision}", f"train.strategy={strategy}")
            assert other == pytest.approx(alone, rel=1e-2)
