"""Dropout whose numbers follow from a place and a seed: as random as it has to be, and the same mathematics."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM  # noqa: E402

from dray.train.model import attention, dropout  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_is_right_and_neighbours_know_nothing_of_each_other(share: float) -> None:
    torch.manual_seed(1)
    fields = [(dropout.dropped(torch.ones(512, 512), share) != 0).float() for _ in range(4)]
    for field in fields:
        assert field.mean().item() == pytest.approx(1 - share, abs=0.005)
        assert field.mean(0).std().item() == pytest.approx((share * (1 - share) / 512) ** 0.5, rel=0.15)
        for lag in (1, 2, 3, 8, 64, 512, 513):
            flat = field.flatten() - field.mean()
            assert abs((flat[lag:] * flat[:-lag]).mean().item()) < 0.004
    for other in fields[1:]:
        assert abs(((fields[0] - fields[0].mean()) * (other - other.mean())).mean().item()) < 0.004


def test_the_mean_stays_and_the_seed_decides() -> None:
    torch.manual_seed(3)
    first, second = (dropout.dropped(torch.ones(1000, 100), 0.2) for _ in range(2))
    assert first.mean().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, dropout.dropped(torch.ones(1000, 100), 0.2))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_attention_is_the_same_but_for_what_is_left_out(kind: str, monkeypatch) -> None:
    if kind == "gpt2":
        network = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=50))
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        network = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=50, attention_dropout=0.1, **sizes))
    rows = torch.randint(0, 50, (2, 16))
    apart = torch.arange(16)[None] % 7
    wanted = [network.eval()(rows).logits, network(rows, position_ids=apart).logits]
    dropout.install(network)
    network.set_attn_implementation(attention._DROPOUT)
    monkeypatch.setattr(dropout, "dropped", lambda values, share: values)
    found = [network.train()(rows).logits, network(rows, position_ids=apart).logits]
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, torch.nn.Dropout) for module in network.modules())
