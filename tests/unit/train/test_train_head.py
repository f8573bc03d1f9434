"""The head and the loss: the labelled tokens alone, and the same numbers as transformers' whole logits give."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from torch.nn import functional  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM  # noqa: E402

from dray.contract.findings import DrayError  # noqa: E402
from dray.train.model import head  # noqa: E402
from dray.train.model.head import IGNORE_INDEX  # noqa: E402
from dray.train.objectives.base import Batch, LossModule  # noqa: E402

pytestmark = pytest.mark.torch

WORDS = 61
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SMALL = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 32}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 8, "dropout": 0.0},
    "gpt_neo": {**SIZES, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
    "llama": GROUPED,
    "gemma2": {**GROUPED, "final_logit_softcapping": 3.0},
    "granite": {**GROUPED, "logits_scaling": 8.0},
    "bert": BERT,
    "roberta": BERT,
    "mobilebert": {**BERT, "embedding_size": 8, "intra_bottleneck_size": 8},
}  # fmt: skip


def network(kind: str, **settings: Any):
    torch.manual_seed(3)
    masked = kind in ("bert", "roberta", "mobilebert")
    made = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config(
        AutoConfig.for_model(kind, **MODELS[kind] | settings)
    )
    for weight in made.parameters():  # biases too
        weight.data.normal_(std=0.3)
    return made.double()


def batch(share: float = 0.2, rows: int = 4, length: int = 30) -> Batch:
    chance = torch.Generator().manual_seed(5)
    ids = torch.randint(3, WORDS, (rows, length), generator=chance)
    labels = torch.randint(0, WORDS, ids.shape, generator=chance)
    labels[torch.rand(ids.shape, generator=chance) >= share] = IGNORE_INDEX
    return Batch(ids, labels, None).to(torch.device("cpu"))


def plain(made, given: Batch):
    logits = made(input_ids=given.input_ids).logits
    return functional.cross_entropy(logits.flatten(0, 1), given.labels.flatten(), reduction="sum"), logits


def gradients(made, loss) -> dict[str, Any]:
    made.zero_grad()
    (loss * 0.25).backward()
    return {name: weight.grad.clone() for name, weight in made.named_parameters() if weight.grad is not None}


PLAIN = [kind for kind in MODELS if kind not in ("gemma2", "granite", "mobilebert")]


@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize(
    ("kind", "how", "share"),
    [
        *((kind, "full", share) for kind in MODELS for share in (0.0, 0.2)),
        ("gpt2", "full", 0.95),
        *((kind, "chunked", 0.2) for kind in PLAIN),
        ("gpt2", "chunked", 0.95),
        ("bert", "chunked", 0.0),
    ],
)
def test_a_loss_of_the_labelled_tokens_is_that_of_whole_logits(
    kind: str, how: str, share: float, multiple: int
) -> None:
    made, given = network(kind), batch(share)
    wanted, logits = plain(made, given)
    expected = gradients(made, wanted)
    head.check(made, how)
    shapes = {name: one.shape for name, one in made.state_dict().items()}
    module = LossModule(made, how, multiple=multiple)
    loss, hits = module(*given.inputs)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert hits.tolist() == [0, 0]
    found = gradients(made, loss)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)

    made.eval()
    given.labels[0] = torch.where(given.labels[0] == IGNORE_INDEX, IGNORE_INDEX, logits[0].argmax(1))
    right = logits.argmax(2) == given.labels
    hit_rows = [
        bool((row | (labels == IGNORE_INDEX)).all()) and bool((labels >= 0).any())
        for row, labels in zip(right, given.labels, strict=True)
    ]
    with torch.no_grad():
        assert module(*given.inputs)[1].tolist() == [int(right.sum()), sum(hit_rows)]
        assert torch.equal(made(input_ids=given.input_ids).logits, logits), "outside of a loss all is as it was"
    assert {name: one.shape for name, one in made.state_dict().items()} == shapes


@pytest.mark.parametrize("how", ["full", "chunked"])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize(("multiple", "words"), [(0, 61), (1, 61), (61, 61), (8, 64), (128, 128)])
def test_the_head_computes_with_a_multiple_of_words(
    monkeypatch: pytest.MonkeyPatch, how: str, half: torch.dtype | None, multiple: int, words: int
) -> None:
    seen, usual = set(), functional.linear

    def linear(hidden, weight, bias=None):
        seen.add(len(weight))
        return usual(hidden, weight, bias)

    made, given = network("llama", hidden_size=32, intermediate_size=32).float(), batch()
    loss, hits = {}, {}
    for each in (1, multiple):
        module = LossModule(made, how, half, each)
        monkeypatch.setattr(functional, "linear", linear if each == multiple else usual)
        with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
            loss[each] = float(module(*given.inputs)[0].detach())
            with torch.no_grad():
                hits[each] = module(*given.inputs)[1].tolist()
        made.get_output_embeddings().forward = module._logits_of
    assert {rows for rows in seen if rows > 32} == {words}  # a layer has 32 at most
    assert loss[multiple] == pytest.approx(loss[1], rel=1e-6 if half is None else 1e-3)
    assert hits[multiple] == hits[1]


@pytest.mark.parametrize("how", ["full", "chunked"])
def test_a_frozen_head_is_padded_too(how: str) -> None:
    """As LoRA leaves it; where a word that is no word would be likely, it changes nothing."""
    found = []
    for multiple in (1, 128):
        made, given = network("llama"), batch()
        made.get_output_embeddings().requires_grad_(False)
        made.get_output_embeddings().weight.data -= 30
        loss, _ = LossModule(made, how, multiple=multiple)(*given.inputs)
        found.append({"loss": loss.detach().double(), **gradients(made, loss)})
    assert "lm_head.weight" not in found[1]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_only_labelled_tokens_reach_the_head() -> None:
    made, seen = network("bert"), []
    last = made.get_output_embeddings()
    usual, last.forward = last.forward, lambda hidden: seen.append(hidden.shape) or usual(hidden)
    module = LossModule(made)
    for share in (0.0, 0.15, 0.95, 1.0):
        module(*batch(share).inputs)
    assert [tuple(shape) for shape in seen] == [(1, 8, 16), (1, 24, 16), (4, 30, 16), (4, 30, 16)]


@pytest.mark.parametrize("predicted", [0, 1, 8, 9, 100, 112, 113, 119, 120])
def test_the_part_of_a_batch_with_labels_has_few_sizes(predicted: int) -> None:
    """And no token is twice in it: gradients are put back to their places."""
    labels = torch.full((120,), IGNORE_INDEX)
    labels[torch.randperm(120)[:predicted]] = 1
    places = Batch(labels[None], labels[None], None).to(torch.device("cpu")).labelled
    if predicted > 112:
        assert places is None
        return
    assert len(places) == max(-(-predicted // 8), 1) * 8
    assert len(set(places.tolist())) == len(places)
    assert int((labels[places] != IGNORE_INDEX).sum()) == predicted


@pytest.mark.parametrize(
    "kind",
    ["gemma2", "granite", "mobilebert"],
)
def test_a_model_that_changes_its_logits_has_no_chunked_loss(kind: str) -> None:
    made = network(kind)
    with pytest.raises(DrayError) as stopped:
        head.check(made, "chunked")
    assert (stopped.value.problem, stopped.value.finding.code) == (
        "train.loss = chunked does not compute this model's loss",
        78,
    )
    assert stopped.value.finding.found.startswith(f"{kind}, which changes logits after its head")
    assert stopped.value.finding.fix == "train.loss=full"
    head.check(made, "full")


def test_a_frozen_head_has_no_gradient_and_the_layers_below_have_theirs() -> None:
    made, given = network("llama"), batch()
    made.get_output_embeddings().requires_grad_(False)
    expected = gradients(made, plain(made, given)[0])
    found = gradients(made, LossModule(made, "chunked")(*given.inputs)[0])
    assert found.keys() == expected.keys()
    assert "lm_head.weight" not in found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])


def test_no_tensor_of_tokens_times_vocabulary_is_made() -> None:
    """Not for a moment, and with gradients: every tensor that any operator returns is looked at."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for one in found if isinstance(found, tuple | list) else (found,):
                if isinstance(one, torch.Tensor) and one.shape[-1:] == (5000,):
                    largest = max(largest, one.numel() // 5000)
            return found

    made, given = network("gpt2", vocab_size=5000).float(), batch(1.0, rows=16)
    rows = {}
    for how in ("full", "chunked"):
        largest = 0
        module = LossModule(made, how)
        with Sizes():
            module(*given.inputs)[0].backward()
            made.eval()
            with torch.no_grad():
                module(*given.inputs)
            made.train()
        rows[how] = largest
        made.get_output_embeddings().forward = module._logits_of
    assert rows == {"full": 480, "chunked": 60}


def test_in_16_bits_sums_are_made_in_32() -> None:
    """And the products in the type that they have in whole logits."""
    chance = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 32, generator=chance).requires_grad_() for size in (512, 300))
    labels = torch.randint(0, 300, (512,), generator=chance)
    exact = functional.cross_entropy((hidden.double() @ weight.double().t()), labels, reduction="sum")
    expected = torch.autograd.grad(exact, (hidden, weight))
    loss, _ = head.ChunkedLoss.apply(hidden, weight, None, labels, torch.bfloat16, head.cross_entropy, True)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-3)
    for found, one in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        assert float((found - one).norm() / one.norm()) < 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch 2.13's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own look at it
@pytest.mark.filterwarnings("ignore:The distutils package:DeprecationWarning")  # Inductor imports it
@pytest.mark.parametrize("how", ["full", "chunked"])
@pytest.mark.parametrize("half", [False, True])
def test_a_compiled_cross_entropy_gives_the_same_numbers(how: str, half: bool) -> None:
    """Also for another number of rows, for which nothing is compiled again, and with words excluded by a bias."""
    made = network("gpt2").float()
    compiled, plain_torch = (LossModule(made, how, multiple=8, compiled=on) for on in (True, False))
    counts = []
    for rows in (4, 6, 10):
        given, found = batch(0.5, rows), []
        for module in (compiled, plain_torch):
            made.get_output_embeddings().forward = module._head_forward
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss, _ = module(*given.inputs)
            found.append({"loss": loss.detach(), **gradients(made, loss)})
        near = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found[0], found[1], **near)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[1] == counts[-1]
