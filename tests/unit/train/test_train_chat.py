"""Conversations: what is learned of them is what an assistant says, and where one ends another begins."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import numpy as np  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from dray.contract.findings import ConfigError  # noqa: E402
from dray.train import objectives  # noqa: E402
from dray.train.data import encoding, formats, resolve, tokenizer  # noqa: E402
from dray.train.data.encoding import LAST_WORD, end_token  # noqa: E402
from dray.train.data.token_cache import IDS, LABEL, LAST, Tokens  # noqa: E402
from dray.train.loop.evaluate import Evaluated, Evaluator, Window, windows_of, windows_of_documents  # noqa: E402
from dray.train.objectives.base import Batch  # noqa: E402
from trainings import config  # noqa: E402

pytestmark = pytest.mark.torch

CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As models that think: what an earlier turn thought is not shown again.
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HIDES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "The tug é."},
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "Well."},
]


def learned(template: str | None, *chats: list[dict]) -> tuple[list[str], int]:
    """Stretches of the labels, and how many documents there are."""
    tokens = tokenizer.of_bytes()
    tokens.chat_template = template
    encoding.ensure_chat_template(tokens)
    found = np.array(encoding.conversation_encoder(tokens, end_token(tokens))([json.dumps(one) for one in chats]))
    wanted = (found & LABEL) != 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(int)))
    texts = [tokens.decode(found[a:b] & IDS) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return texts, int(((found & LAST) != 0).sum())


def test_only_what_the_assistant_says_is_learned() -> None:
    assert learned(None, TURNS) == (["The tug é.<|endoftext|>", "Well.<|endoftext|>"], 1)
    # This template's end of a turn is not the tokenizer's end of a text, which is added, and learned as well.
    assert learned(CHAT_ML, TURNS, TURNS[1:3]) == (
        ["The tug é.<|im_end|>", "Well.<|im_end|>", "<|endoftext|>", "The tug é.<|im_end|>", "<|endoftext|>"], 2,
    )  # fmt: skip


def test_an_answer_that_begins_within_a_token_is_learned_whole() -> None:
    """Where a prompt ends in a space, many tokenizers join it to the answer's first word."""
    tokens = tokenizer.of_bytes()
    joined = Tokenizer(models.BPE(vocab={**tokens.get_vocab(), "Ġy": 300}, merges=[("Ġ", "y")]))
    joined.pre_tokenizer = tokens.backend_tokenizer.pre_tokenizer
    joined.decoder = tokens.backend_tokenizer.decoder
    fast = type(tokens)(tokenizer_object=joined, eos_token=tokenizer.END)
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    found = np.array(encoding.conversation_encoder(fast, end_token(fast))([json.dumps(said)]))
    assert fast.decode(found[(found & LABEL) != 0] & IDS) == " yes<|endoftext|>"


def test_an_answer_to_nobody_is_read_and_not_learned() -> None:
    strict = "{% if not messages %}{{ raise_exception('no message') }}{% endif %}" + CHAT_ML
    assert learned(strict, [TURNS[2], *TURNS[1:3]])[0][0] == "The tug é.<|im_end|>"
    assert encoding.conversation(TURNS[2:3], "x", "messages") == ""


def test_a_turn_that_is_shown_otherwise_later_is_read_and_not_learned() -> None:
    assert learned(THINKS, TURNS)[0] == ["<think></think>Well.", "<|endoftext|>"]


def test_a_template_that_hides_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match="the chat template does not show where an answer begins"):
        learned(HIDES, TURNS)
    with pytest.raises(ConfigError, match="no system here"):
        learned("{{ raise_exception('no system here') }}", TURNS)


def test_conversations_are_found_under_the_names_that_are_about() -> None:
    shared = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}, {"from": "human", "value": "Oh."}]
    plain = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    for row in (shared, plain):
        found = json.loads(encoding.conversation(row, "x", "messages"))
        assert [(said["role"], said["content"]) for said in found] == [("user", "Who?"), ("assistant", "I.")]
    assert encoding.conversation(plain[:1], "x", "messages") == ""
    assert [said["role"] for said in json.loads(encoding.exchange("Who?", "I."))] == ["user", "assistant"]


@pytest.mark.parametrize(
    "row", ["text", "[INST] x", 5, None, ["text"], [{"role": "user"}], [{"role": "bot", "content": "x"}]]
)
def test_what_is_no_conversation_is_refused(row: object) -> None:
    with pytest.raises(ConfigError, match="column 'messages' holds no conversations") as stopped:
        encoding.conversation(row, "my.jsonl", "messages")
    assert "set data.answer_column too" in stopped.value.finding.fix


def test_questions_and_answers_may_be_two_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a\nWho?,I.\nWhy?,\n")
    (piece,) = resolve.dataset(str(tmp_path / "a.csv"), "train").pieces(formats.Reading("q"))
    (found,) = formats.documents(piece, formats.Reading("q", is_conversation=True, answer="a"))
    assert [said["content"] for said in json.loads(found)] == ["Who?", "I."]


def test_labels_follow_the_marks_and_positions_the_documents(tmp_path: Path) -> None:
    settings = config(
        tmp_path, "train.objective=sft", "data.document_mask=true", "data.column=messages", "data.sequence_length=6"
    )
    tokens = tokenizer.load(settings)
    objective = objectives.named("sft")(settings, tokens)
    row = np.array([[1, 2 | LABEL, 3 | LABEL | LAST, 4, 5 | LABEL, end_token(tokens)]])
    batch = objective.batch(row, range(1))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, end_token(tokens)]]
    assert batch.labels.tolist() == [[2, 3, -100, 5, -100, -100]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]  # an end of a turn within is none of the document
    assert not objective.even


def test_a_last_word_is_marked_with_all_of_its_tokens() -> None:
    tokens = tokenizer.of_bytes()
    found = np.array(LAST_WORD.encoder(tokens, end_token(tokens))(["one two\n", "x"]))
    assert tokens.decode(found[(found & LABEL) != 0] & IDS) == "twox"
    assert np.flatnonzero(found & LAST).tolist() == [7, 9]


def test_a_last_word_counts_once_whatever_its_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.tensor([[-100, -100, -100, 5], [-100, 1, 2, 3]])
    network = torch.nn.Identity()
    losses = SimpleNamespace(  # all four tokens together have a loss of 6; two of them are right, and one word
        device=torch.device("cpu"), network=network, losses=lambda _: (torch.tensor(6.0), torch.tensor([2, 1]))
    )
    objective = SimpleNamespace(batch=lambda rows, _: Batch(torch.tensor(rows), labels, None))
    own: Any = SimpleNamespace(
        strategy=losses, config=SimpleNamespace(per_device=2, data=SimpleNamespace(sequence_length=4))
    )
    own._batch = partial(Evaluator._batch, own)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    evaluated: Any = Evaluated(Tokens(np.arange(8), np.array([0, 4, 8])), [Window(0, 0, 4)] * 2, objective, True)
    found = Evaluator._measure(own, evaluated)
    assert found == {"loss": 3.0, "perplexity": pytest.approx(math.exp(3)), "accuracy": 0.5}
    assert Evaluator._measure(own, evaluated._replace(by_word=False))["loss"] == 1.5


def covered(windows: list[Window]) -> list[int]:
    """The tokens that are predicted."""
    return sorted(window.start + place + 1 for window in windows for place in range(window.begin, window.end))


@pytest.mark.parametrize("total", [2, 9, 10, 11, 19, 20, 21, 57])
@pytest.mark.parametrize("stride", [1, 3, 9])
def test_with_a_stride_each_token_counts_once_and_has_much_before_it(total: int, stride: int) -> None:
    windows = windows_of(total, 10, stride, predicts_next=True)
    assert covered(windows) == list(range(1, total))
    assert all(window.begin >= 10 - stride - 1 for window in windows if window.start)
    assert covered(windows_of(total, 10, 0, predicts_next=True)) == [token for token in range(total) if token % 10]


def test_a_document_is_seen_as_far_back_as_a_sample_reaches() -> None:
    tokens = Tokens(np.arange(25), np.array([0, 5, 25]))
    assert windows_of_documents(tokens, 10) == [Window(0, 0, 3), Window(14, 0, 9)]
