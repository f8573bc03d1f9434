"""Layers of a model are found, and each is compiled as one graph: by itself, under ddp and fsdp, with checkpointing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM  # noqa: E402

from dray.train.model.layers import layers  # noqa: E402
from dray.train.parallel.fsdp import Fsdp  # noqa: E402
from helpers import ROOT  # noqa: E402
from nodes import free_port  # noqa: E402

pytestmark = pytest.mark.torch

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32}
GATED = {**SMALL, "num_hidden_layers": 3, "intermediate_size": 64, "num_key_value_heads": 2}
MODELS = {
    "gpt2": {
        "vocab_size": 64, "n_embd": 32, "n_head": 4, "n_positions": 32, "n_layer": 3, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": GATED,
    "qwen3": {**GATED, "head_dim": 8},
    "bert": {**SMALL, "num_hidden_layers": 3, "intermediate_size": 64},
    "opt": {**SMALL, "num_hidden_layers": 3, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {**SMALL, "num_hidden_layers": 3, "intermediate_size": 64},
}  # fmt: skip
MIXTRAL = {**GATED, "num_hidden_layers": 2, "num_local_experts": 8}


def built(kind: str, settings: dict):
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(AutoConfig.for_model(kind, **settings))


@pytest.mark.parametrize("kind", [*MODELS, "mixtral"])
def test_the_layers_are_those_of_transformers(kind: str) -> None:
    settings = MIXTRAL if kind == "mixtral" else MODELS[kind]
    network = built(kind, settings)
    found = layers(network)
    assert len(found) == network.config.num_hidden_layers
    assert {type(layer).__name__ for layer in found} <= set(network._no_split_modules)


def test_fsdp_moves_a_shard_where_it_is_now() -> None:
    """torch 2.9 pads a shard of fewer rows in the first forward pass, in other memory."""
    strategy = Fsdp.__new__(Fsdp)
    weight, stale = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), 2.0)
    strategy._locals = {weight: stale}
    optimizer = torch.optim.SGD([stale], lr=0.25)
    optimizer.state[stale] = {}
    strategy._optimizers = [optimizer]
    assert [gradient.tolist() for gradient in strategy._gradients()] == [[2.0, 2.0, 2.0]]
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5, 0.5]
    strategy._drop_gradients()
    assert (weight.grad, stale.grad) == (None, None)


@pytest.mark.slow
def test_no_graph_breaks_in_any_layer() -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/graphs.py"), json.dumps(MODELS)],
        env={**os.environ, **env, "MASTER_PORT": str(free_port())}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [row[:3] for row in seen] == [
        [kind, strategy, checkpointing]
        for kind in MODELS for strategy in ("ddp", "fsdp") for checkpointing in (False, True)
    ]  # fmt: skip
    for row in seen:
        assert row[3] == {}, row
        assert row[4]["ok"] == row[4]["total"], row
        assert row[6] == pytest.approx(seen[0][6] if row[0] == "gpt2" else row[6], rel=0.02)
        assert row[5]["unique_graphs"] <= 5, row  # of 3 layers, in training and evaluation
