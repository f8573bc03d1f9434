"""Attention without a mask where none is needed: flash kernels take none, and do half of the work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, masking_utils  # noqa: E402
from transformers.integrations import sdpa_attention  # noqa: E402
from transformers.utils import output_capturing  # noqa: E402

from dray.train.model import attention, attention_scores  # noqa: E402
from dray.train.objectives.base import LossModule  # noqa: E402
from trainings import config  # noqa: E402

pytestmark = pytest.mark.torch

T, CPU = 32, torch.device("cpu")
SDPA = torch.nn.functional.scaled_dot_product_attention
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": LLAMA,
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 64, "max_position_embeddings": 64, "dropout": 0.0},
    "gpt_neo": {**SIZES, "attention_types": [[["global", "local"], 1]], "num_hidden_layers": 2, "num_heads": 4,
                "max_position_embeddings": 64, "window_size": 8, "resid_dropout": 0.0, "embed_dropout": 0.0,
                "attention_dropout": 0.0},
    "bert": {**SIZES, "intermediate_size": 64, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0},
    "mistral": {**LLAMA, "sliding_window": T},
    "gemma3_text": {**LLAMA, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 8,
                    "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
MAIN = ("gpt2", "llama", "bert", "gemma3_text")
PACKED = masking_utils.find_packed_sequence_indices  # transformers' own; what other tests run here replaces it
CAUSAL = {"mask": None, "is_causal": True, "grouped": False}
GROUPED = {**CAUSAL, "grouped": True}
WINDOW = {"mask": ((2, 1, T, T), torch.bool), "is_causal": False, "grouped": False}
WANTED = {
    "gpt2": [CAUSAL],
    "llama": [GROUPED],
    "opt": [CAUSAL],
    "gpt_neo": [],
    "bert": [{**CAUSAL, "is_causal": False}],
    "mistral": [GROUPED],  # no row is longer than the window
    "gemma3_text": [WINDOW, GROUPED],
}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", PACKED)
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    # A whole model was compiled. transformers believes that it still is: the next model would have no router logits.
    output_capturing._active_collector.reset(None)


def kinds(*names: str) -> list:
    """Dynamo takes seconds for each: the others are slow tests."""
    return [name if name in MAIN else pytest.param(name, marks=pytest.mark.slow) for name in names]


def network(kind: str, **settings: Any) -> Any:
    torch.manual_seed(1)
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(kind, **MODELS[kind] | settings)).train()


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows, and where in their documents their tokens are."""
    found = torch.randint(0, 128, (2, T), generator=torch.Generator().manual_seed(2))
    return found, found.roll(-1, 1), (torch.arange(T) % 12).expand(2, T)


def shown(mask: torch.Tensor | None, key: torch.Tensor, query: torch.Tensor, options: dict) -> dict[str, Any]:
    fewer = key.shape[1] < query.shape[1]
    assert fewer == options.get("enable_gqa", False)
    seen = None if mask is None else (tuple(mask.shape), mask.dtype)
    return {"mask": seen, "is_causal": options["is_causal"], "grouped": fewer}


def compiled(module: torch.nn.Module, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, list[dict], list[Any]]:
    """Its loss in one graph, how the graph calls SDPA, and the graph's nodes."""
    nodes: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        nodes.extend(graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    loss, _ = torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    calls = []
    for node in nodes:
        if node.target is SDPA:
            query, key = (one.meta["example_value"] for one in node.args[:2])
            mask = node.kwargs["attn_mask"]
            calls.append(shown(None if mask is None else mask.meta["example_value"], key, query, node.kwargs))
    return loss, calls, nodes


@pytest.mark.parametrize("kind", kinds(*MODELS))
def test_a_compiled_model_has_no_mask_where_none_is_needed(kind: str, tmp_path: Path) -> None:
    tokens, labels, _ = rows()
    wanted, _ = LossModule(network(kind))(tokens, labels, None, None)  # as transformers does it, in eager mode
    attention.look_for_documents(masked=False)
    mine = network(kind)
    attention.install(mine, config(tmp_path), CPU)
    module = LossModule(mine)
    eager, _ = module(tokens, labels, None, None)
    loss, calls, nodes = compiled(module, tokens, labels, None, None)
    assert calls == WANTED[kind]
    masks = [node for node in nodes if getattr(node.meta.get("example_value"), "dtype", None) is torch.bool]
    assert kind in ("gpt_neo", "gemma3_text") or not [node for node in masks if node.meta["example_value"].dim() > 2]
    assert torch.equal(eager, wanted)
    assert torch.equal(loss, eager)


@pytest.mark.parametrize("kind", kinds("gpt2", "llama", "mistral"))
def test_documents_have_a_mask_and_the_same_loss(kind: str, tmp_path: Path) -> None:
    tokens, labels, positions = rows()
    wanted, _ = LossModule(network(kind))(tokens, labels, positions, None)
    attention.look_for_documents(masked=True)
    mine = network(kind)
    attention.install(mine, config(tmp_path, "data.document_mask=true"), CPU)
    loss, calls, _ = compiled(LossModule(mine), tokens, labels, positions, None)
    assert [call["mask"] for call in calls] == [((2, 1, T, T), torch.bool)]
    assert torch.equal(loss, wanted)


def test_a_window_hides_what_it_hid(tmp_path: Path) -> None:
    """Also where it is one token shorter than a row."""
    tokens, labels, _ = rows()
    for window, masks in ((T - 1, [((2, 1, T, T), torch.bool)]), (T, [None])):
        wanted, _ = LossModule(network("mistral", sliding_window=window))(tokens, labels, None, None)
        attention.look_for_documents(masked=False)
        mine = network("mistral", sliding_window=window)
        attention.install(mine, config(tmp_path / str(window)), CPU)
        loss, calls, _ = compiled(LossModule(mine), tokens, labels, None, None)
        assert [call["mask"] for call in calls] == masks
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)


def on_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Any, *words: str, capability=(9, 0)) -> tuple:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    chosen = config(tmp_path, "train.precision=bf16", *words)
    why = attention.install(model, chosen, torch.device("cuda", 0))
    return model.config._attn_implementation, why


DOCUMENTS = "data.document_mask=true"
NO_FLEX = (
    "sdpa with a mask for documents: flex_attention needs compute capability 8.0, a head size of 16, no dropout, and a "
    "model that has it"
)


@pytest.mark.parametrize(
    ("words", "capability", "settings", "name", "why"),
    [
        ((), (9, 0), {}, "dray-sdpa", "sdpa without a mask where is_causal is enough"),
        ((DOCUMENTS,), (9, 0), {}, "dray-flex", "flex_attention: it skips what the mask for documents hides"),
        ((DOCUMENTS, "model.attn_implementation=sdpa"), (9, 0), {}, "dray-sdpa", "sdpa with a mask for documents"),
        ((DOCUMENTS,), (7, 0), {}, "dray-sdpa", NO_FLEX),
        ((DOCUMENTS,), (8, 0), {"attention_dropout": 0.1}, "dray-sdpa", NO_FLEX),
        ((DOCUMENTS,), (8, 0), {"head_dim": 8}, "dray-sdpa", NO_FLEX),
    ],
)
def test_the_choice_on_a_gpu(monkeypatch, tmp_path: Path, words, capability, settings: dict, name, why) -> None:
    assert on_gpu(monkeypatch, tmp_path, network("llama", **settings), *words, capability=capability) == (name, why)


def test_a_model_that_has_eager_attention_alone_keeps_it(tmp_path: Path) -> None:
    model = network("gpt_neo")
    assert attention.install(model, config(tmp_path), CPU).startswith("eager: ")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("words", [("train.precision=fp16",), ("train.precision=fp32",)])
def test_grouped_heads_are_expanded_without_flash_attention(monkeypatch, tmp_path: Path, words: tuple) -> None:
    """On a GPU before Ampere, and in 32 bits."""
    tokens, labels, _ = rows()
    wanted, _ = LossModule(network("llama"))(tokens, labels, None, None)
    attention.look_for_documents(masked=False)
    mine = network("llama")
    on_gpu(monkeypatch, tmp_path, mine, *words, capability=(7, 0) if "fp16" in words[0] else (9, 0))
    loss, calls, _ = compiled(LossModule(mine), tokens, labels, None, None)
    assert calls == [CAUSAL]
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.13's own tracing
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    "kind", ["mistral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("opt", "llama"))]
)
def test_flex_attention_hides_what_the_mask_for_documents_hides(kind: str, monkeypatch, tmp_path: Path) -> None:
    """One graph, whose block mask is the same mask, and whose logits are the same."""
    tokens, labels, positions = rows()
    settings = {"sliding_window": 8} if kind == "mistral" else {}
    wanted, _ = LossModule(network(kind, **settings))(tokens, labels, positions, None)
    attention.look_for_documents(masked=True)
    mine = network(kind, **settings)
    assert on_gpu(monkeypatch, tmp_path, mine, DOCUMENTS)[0] == "dray-flex"
    with torch.no_grad():
        loss, calls, nodes = compiled(LossModule(mine), tokens, labels, positions, None)
    assert not calls
    assert sum("flex_attention" in str(node.target) for node in nodes) == 1
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("length", [1, 300])
def test_scores_are_made_for_one_head_at_a_time(length: int) -> None:
    """Also of heads that share keys."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, 16, dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, 2, length, 16, dtype=torch.bfloat16)
    every = (query[0].float() @ key[0].repeat_interleave(2, dim=0).float().mT) * 0.25
    attention_scores._largest.clear()
    with Largest() as largest:
        attention_scores._observed(SimpleNamespace(is_causal=True, num_key_value_groups=2), query, key, value, None)
    torch.testing.assert_close(attention_scores._largest.pop(), torch.stack([-every.min(), every.max()]))
    assert largest.scores <= length * length


class Largest(TorchDispatchMode):
    """Numbers of the largest product of matrices in fp32."""

    scores = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.scores = max(self.scores, made.numel())
        return made
