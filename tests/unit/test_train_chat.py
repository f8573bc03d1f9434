"""Conversations: what is learnt of them is what an assistant says, and where one ends another begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import numpy as np  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from dray.train import chat, objective, sources, words  # noqa: E402
from dray.train.evaluate import Window, _blocks, _documents  # noqa: E402
from dray.train.shards import IDS, LAST, WANTED, Tokens  # noqa: E402
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


def learnt(template: str | None, *chats: list[dict]) -> tuple[list[str], int]:
    """Stretches of what is to be foretold, and how many documents there are."""
    tokens = words._of_bytes(masked=False, chats=False)
    tokens.chat_template = template
    chat.teach(tokens)
    found = np.array(chat.encoder(tokens, words.ended(tokens))([json.dumps(one) for one in chats]))
    wanted = (found & WANTED) != 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(int)))
    texts = [tokens.decode(found[a:b] & IDS) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return texts, int(((found & LAST) != 0).sum())


def test_only_what_the_assistant_says_is_learnt() -> None:
    assert learnt(None, TURNS) == (["The tug é.<|endoftext|>", "Well.<|endoftext|>"], 1)
    # This template's end of a turn is not the tokenizer's end of a text, which is added, and learnt as well.
    assert learnt(CHAT_ML, TURNS, TURNS[1:3]) == (
        ["The tug é.<|im_end|>", "Well.<|im_end|>", "<|endoftext|>", "The tug é.<|im_end|>", "<|endoftext|>"], 2,
    )  # fmt: skip


def test_an_answer_that_begins_within_a_token_is_learnt_whole() -> None:
    """Where a prompt ends in a space, many tokenizers join it to the answer's first word."""
    tokens = words._of_bytes(masked=False, chats=False)
    joined = Tokenizer(models.BPE(vocab={**tokens.get_vocab(), "Ġy": 300}, merges=[("Ġ", "y")]))
    joined.pre_tokenizer = tokens.backend_tokenizer.pre_tokenizer
    joined.decoder = tokens.backend_tokenizer.decoder
    fast = type(tokens)(tokenizer_object=joined, eos_token=words.END)
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    found = np.array(chat.encoder(fast, words.ended(fast))([json.dumps(said)]))
    assert fast.decode(found[(found & WANTED) != 0] & IDS) == " yes<|endoftext|>"


def test_an_answer_to_nobody_is_read_and_not_learnt() -> None:
    strict = "{% if not messages %}{{ raise_exception('no message') }}{% endif %}" + CHAT_ML
    assert learnt(strict, [TURNS[2], *TURNS[1:3]])[0][0] == "The tug é.<|im_end|>"
    assert chat.conversation(TURNS[2:3], "x", "messages") == ""


def test_a_turn_that_is_shown_otherwise_later_is_read_and_not_learnt() -> None:
    assert learnt(THINKS, TURNS)[0] == ["<think></think>Well.", "<|endoftext|>"]


def test_a_template_that_hides_answers_is_refused(capsys) -> None:
    with pytest.raises(SystemExit, match="78"):
        learnt(HIDES, TURNS)
    assert "the chat template hides where an answer begins" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="78"):
        learnt("{{ raise_exception('no system here') }}", TURNS)
    assert "no system here" in capsys.readouterr().err


def test_conversations_are_found_under_the_names_that_are_about() -> None:
    shared = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}, {"from": "human", "value": "Oh."}]
    plain = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    for row in (shared, json.dumps(shared), plain):
        found = json.loads(chat.conversation(row, "x", "messages"))
        assert [(said["role"], said["content"]) for said in found] == [("user", "Who?"), ("assistant", "I.")]
    assert chat.conversation(plain[:1], "x", "messages") == ""
    assert [said["role"] for said in json.loads(chat.exchange("Who?", "I."))] == ["user", "assistant"]


@pytest.mark.parametrize(
    "row", ["text", "[INST] x", 5, None, ["text"], [{"role": "user"}], [{"role": "bot", "content": "x"}]]
)
def test_what_is_no_conversation_is_said(row: object, capsys) -> None:
    with pytest.raises(SystemExit, match="78"):
        chat.conversation(row, "my.jsonl", "messages")
    said = capsys.readouterr().err
    assert "column 'messages' holds no conversations" in said
    assert "set data.column and data.answer_column" in said


def test_questions_and_answers_may_be_two_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a\nWho?,I.\nWhy?,\n")
    (piece,) = sources.pieces((str(tmp_path / "a.csv"),))
    (found,) = sources.documents(piece, sources.Reading("q", chats=True, answer="a"))
    assert [said["content"] for said in json.loads(found)] == ["Who?", "I."]


def test_targets_follow_the_marks_and_positions_the_documents(tmp_path: Path) -> None:
    settings = config(
        tmp_path, "train.objective=sft", "data.document_mask=true", "data.column=messages", "data.sequence_length=6"
    )
    tokens = words.tokenizer(settings)
    task = objective.task(settings, tokens, words.ended(tokens))
    row = np.array([[1, 2 | WANTED, 3 | WANTED | LAST, 4, 5 | WANTED, words.ended(tokens)]])
    batch = task.batch(row, range(1))
    assert batch.rows.tolist() == [[1, 2, 3, 4, 5, words.ended(tokens)]]
    assert batch.targets.tolist() == [[2, 3, -100, 5, -100, -100]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2]]  # an end of a turn within is none of the document
    assert not task.even


def test_a_last_word_is_marked_with_all_of_its_tokens() -> None:
    tokens = words._of_bytes(masked=False, chats=False)
    found = np.array(chat.last_words(tokens, words.ended(tokens))(["one two\n", "x"]))
    assert tokens.decode(found[(found & WANTED) != 0] & IDS) == "twox"
    assert np.flatnonzero(found & LAST).tolist() == [7, 9]


def covered(windows: list[Window]) -> list[int]:
    """The tokens that are foretold."""
    return sorted(window.start + place + 1 for window in windows for place in range(window.first, window.last))


@pytest.mark.parametrize("total", [2, 9, 10, 11, 19, 20, 21, 57])
@pytest.mark.parametrize("stride", [1, 3, 9])
def test_with_a_stride_each_token_counts_once_and_has_much_before_it(tmp_path: Path, total: int, stride: int) -> None:
    settings = config(tmp_path, "data.sequence_length=10")
    tokens = Tokens(np.arange(total), np.array([0, total]))
    windows = _blocks(tokens, settings, stride)
    assert covered(windows) == list(range(1, total))
    assert all(window.first >= 10 - stride - 1 for window in windows if window.start)
    assert covered(_blocks(tokens, settings, 0)) == [token for token in range(total) if token % 10]


def test_a_document_is_seen_as_far_back_as_a_block_reaches(tmp_path: Path) -> None:
    settings = config(tmp_path, "data.sequence_length=10")
    tokens = Tokens(np.arange(25), np.array([0, 5, 25]))
    assert _documents(tokens, settings) == [Window(0, 0, 3), Window(14, 0, 9)]
