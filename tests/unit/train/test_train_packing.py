"""Documents kept whole in samples: best fit, what is cut and what fills, the same on any ranks and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dray.contract.findings import ConfigError
from dray.runs.prepare import read_recipe
from helpers import ROOT

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import numpy as np  # noqa: E402

from dray.train import objectives  # noqa: E402
from dray.train.data import datasets, tokenizer  # noqa: E402
from dray.train.data.datasets import Datasets  # noqa: E402
from dray.train.data.packing import PADDING, Packed, packed  # noqa: E402
from dray.train.data.token_cache import IDS, Tokens  # noqa: E402
from trainings import config  # noqa: E402

pytestmark = pytest.mark.torch
END = 256


def tokens(lengths: list[int]) -> Tokens:
    """Each document's tokens are its number."""
    ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.uint16)
    return Tokens(ids, np.cumsum([0, *lengths]).astype(np.uint64))


def best_fit(lengths: list[int], size: int) -> list[int]:
    """The rooms that are left, by one piece after another."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else size) - length)
    return sorted(rooms)


def rows(found: Packed) -> list[list[int]]:
    """What each sample holds but its padding."""
    samples = [found.slice(begin, found.length) for begin in range(0, found.total, found.length)]
    return [sample[(sample & PADDING) == 0].tolist() for sample in samples]


@given(some.lists(some.integers(1, 40), max_size=200), some.integers(2, 32))
@settings(max_examples=300, deadline=None)
def test_it_is_best_fit_and_each_document_is_in_one_sample(lengths: list[int], size: int) -> None:
    found = packed(tokens(lengths), size, "bfd", END)
    kept = [min(length, size) for length in lengths]
    assert sorted(size - len(row) for row in rows(found)) == best_fit(kept, size)
    assert Counter(number for row in rows(found) for number in row) == dict(enumerate(kept))
    for row in rows(found):  # whole: no other document is between two of its tokens, and none is in two samples
        assert row == sorted(row)
    assert sum(len(set(row)) for row in rows(found)) == len(lengths)
    firsts = [row[0] for row in rows(found)]
    assert firsts == sorted(firsts)
    assert found.counts() == {
        "documents": len(lengths),
        "longer_than_a_sample": sum(length > size for length in lengths),
        "dropped_tokens": sum(lengths) - sum(kept),
        "padding": len(firsts) * size - sum(kept),
    }


@given(some.lists(some.integers(1, 100), max_size=50), some.integers(2, 32))
@settings(max_examples=200, deadline=None)
def test_bfd_split_drops_nothing_and_splits_no_more_than_it_must(lengths: list[int], size: int) -> None:
    whole = tokens(lengths)
    found = packed(Tokens(np.arange(len(whole.ids)), whole.starts), size, "bfd_split", END)
    pieces = [min(size, length - begin) for length in lengths for begin in range(0, length, size)]
    assert sorted(size - len(row) for row in rows(found)) == best_fit(pieces, size)
    assert sorted(token for row in rows(found) for token in row) == list(range(sum(lengths)))
    assert found.counts()["dropped_tokens"] == 0
    assert found.counts()["documents"] == len(lengths)


def test_a_sample_is_filled_up_and_a_limit_keeps_whole_ones() -> None:
    found = packed(tokens([3, 4, 2]), 5, "bfd", 9)
    assert found.total == 10
    one, two = found.slice(0, 5).tolist(), found.slice(5, 5).tolist()
    assert [one, two] == [[0, 0, 0, 2, 2], [1, 1, 1, 1, 9 | PADDING]]
    assert found.first(9).total == found.first(5).total == 5
    assert found.first(5).slice(0, 5).tolist() == one
    assert found.first(5).counts() == {"documents": 2, "longer_than_a_sample": 0, "dropped_tokens": 0, "padding": 0}


@pytest.mark.slow
def test_a_million_documents_take_seconds() -> None:
    lengths = np.random.default_rng(1).lognormal(5.5, 1.2, 1_000_000).astype(np.int64) + 1
    many = Tokens(np.zeros(0, np.uint16), np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64))
    found = packed(many, 4096, "bfd_split", END)
    assert found.counts()["padding"] / found.total < 0.001


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Documents of 4 to 24 tokens, and one of 51."""
    path = tmp_path / "my lines.txt"
    some_of = [f"{number:03}" + "x" * (number * 7 % 21) for number in range(200)]
    path.write_text("\n".join([*some_of[:50], "long" + "y" * 46, *some_of[50:]]) + "\n")
    return path


def loaded(folder: Path, *overrides: str) -> Datasets:
    chosen = config(folder, *overrides)
    return datasets.load(chosen, tokenizer.load(chosen))


def test_every_epoch_has_every_document_whole_and_another_order(tmp_path: Path, lines: Path, capfd) -> None:
    found = loaded(tmp_path, f"data.train={lines}", f"data.validation={lines}", "data.packing=bfd")
    feed, count, words = found.training, found.total // 32, tokenizer.load(config(tmp_path))
    for epoch in range(3):
        texts = list[str]()
        for row in feed.rows(range(epoch * count, (epoch + 1) * count)):
            own = row[(row & PADDING) == 0]
            assert set((row[len(own) :] & IDS).tolist()) <= {END}
            texts += words.decode(own).removesuffix("<|endoftext|>").split("<|endoftext|>")
        cut = {"long" + "y" * 46: "long" + "y" * 28}  # as long as a sample, without its end
        assert sorted(texts) == sorted(cut.get(line, line) for line in lines.read_text().splitlines())
    order = [feed.rows(range(epoch * count, (epoch + 1) * count)).tobytes() for epoch in range(3)]
    assert len({*order}) == 3
    counts = {"documents": 201, "longer_than_a_sample": 1, "dropped_tokens": 19}
    assert found.packing == counts | {"padding": found.packing["padding"]}
    assert found.validation["eval"].total == found.total
    assert feed.identity == f"{found.total} tokens, bfd"
    said = capfd.readouterr().out
    assert "packing bfd of data.train: " in said
    over = "1 document longer than a sample, 19 tokens dropped\n"
    assert f"% of {found.total:,} tokens are padding; {over}" in said
    assert found.packing["padding"] / found.total < 0.1


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_samples_are_the_same_on_any_ranks(tmp_path: Path, lines: Path, ranks: int, strategy: str) -> None:
    chosen = (f"data.mix.a.dataset={lines}", "data.mix.b.dataset=builtin", f"data.packing={strategy}")
    whole = loaded(tmp_path, *chosen).training.rows(range(40))
    each = [loaded(tmp_path / str(rank), *chosen).training for rank in range(ranks)]
    share = 8 // ranks
    found = [
        each[rank].rows(range(step * 8 + rank * share, step * 8 + (rank + 1) * share))
        for step in range(5)
        for rank in range(ranks)
    ]
    assert np.array_equal(np.concatenate(found), whole)
    assert (whole & PADDING).any()


def test_limits_count_whole_samples(tmp_path: Path, lines: Path) -> None:
    few = loaded(tmp_path, f"data.train={lines}", f"data.validation={lines}", "data.packing=bfd",
                 "data.max_train_samples=7", "data.max_eval_samples=3", "evaluate.more.dataset=builtin",
                 "evaluate.more.max_samples=2")  # fmt: skip
    assert (few.total, few.validation["eval"].total) == (7 * 32, 3 * 32)
    chosen = config(tmp_path, "data.packing=bfd", "evaluate.more.dataset=builtin", "evaluate.more.max_samples=2",
                    "evaluate.over.dataset=builtin", "evaluate.over.stride=8")  # fmt: skip
    bytes_ = tokenizer.load(chosen)
    assert datasets.evaluation(chosen, bytes_, "more").total == 64
    assert not isinstance(datasets.evaluation(chosen, bytes_, "over"), Packed)


@pytest.mark.parametrize("masked", [True, False])
def test_padding_is_no_label_and_no_document_s(tmp_path: Path, masked: bool) -> None:
    chosen = config(tmp_path, "data.packing=bfd", f"data.document_mask={str(masked).lower()}")
    objective = objectives.named("causal")(chosen, tokenizer.load(chosen))
    fill = END | PADDING
    batch = objective.batch(np.array([[5, END, 7, 8, END, fill, fill], [1, 2, 3, 4, 5, 6, END]]), range(2))
    assert batch.input_ids.tolist() == [[5, END, 7, 8, END, END, END], [1, 2, 3, 4, 5, 6, END]]
    over = -100 if masked else 7
    assert batch.labels.tolist() == [[END, over, 8, END, -100, -100, -100], [2, 3, 4, 5, 6, END, -100]]
    if masked:
        assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert not objective.even


def test_conversations_stay_whole_and_an_answer_that_is_cut_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": "?" * (number % 5)}, {"role": "assistant", "content": f"{number:02}"}]
             for number in range(60)]  # fmt: skip
    path.write_text("".join(json.dumps({"text": chat}) + "\n" for chat in chats))
    chosen = config(tmp_path, f"data.train={path}", f"data.validation={path}", "train.objective=sft",
                    "data.packing=bfd", "data.document_mask=true", "data.sequence_length=96",
                    "model.config.n_positions=96")  # fmt: skip
    words = tokenizer.load(chosen)
    found = datasets.load(chosen, words)
    objective = objectives.named("sft")(chosen, words)
    count, answers = found.total // 96, Counter[str]()
    batch = objective.batch(found.training.rows(range(count)), range(count))
    for ids, labels, places in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
        assert places[0] == 0
        wanted = [token for token in labels.tolist() if token != -100]
        answers.update(words.decode(wanted).split("<|endoftext|>")[:-1])
        begins = (places == 0).nonzero()[:, 0].tolist()
        for begin in begins:
            text = words.decode(ids[begin:].tolist())
            assert text.startswith(("<|user|>\n", "<|endoftext|>"))  # a conversation, or the padding
    assert answers == {f"{number:02}": 1 for number in range(60)}
    assert found.packing["dropped_tokens"] == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("data.packing=best-fit",), 'expected one of "wrapped", "bfd", "bfd_split"'),
        (("data.packing=true",), 'expected one of "wrapped", "bfd", "bfd_split"'),
        (("data.packing=BFD",), 'expected one of "wrapped", "bfd", "bfd_split"'),
        (("data.packing=",), 'expected one of "wrapped", "bfd", "bfd_split"'),
        (("data.packing_strategy=bfd",), "packing_strategy"),
        (("data.packing=bfd", "train.objective=masked"), "a masked model would attend to the padding; set data.pack"),
        (("data.packing=bfd", "data.streaming=true", "data.train=x", "data.validation=y"),
         "data.streaming joins documents as they come and cuts them; data.packing = bfd wants all of them first"),
    ],
)  # fmt: skip
def test_what_is_no_packing(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_recipe(ROOT / "tests/tiny.toml", ["train.steps=5", *overrides])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "there are too few tokens in data.train"), ("only\n", "there are too few tokens in data.train")],
)
def test_no_documents_are_no_samples(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "few.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, f"data.train={path}", "data.packing=bfd")
