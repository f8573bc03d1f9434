"""A mix: each source has its share in every block, and gives each of its rows once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dray.contract.findings import ConfigError
from dray.contract.trainer.dataset import BLOCK, quotas
from dray.runs.prepare import read_recipe
from helpers import ROOT

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import numpy as np

from dray.train.data import datasets, tokenizer
from dray.train.data.datasets import Datasets
from dray.train.data.feeds import Mixed
from dray.train.data.order import Mix
from trainings import config

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("size", "weights", "wanted"),
    [
        (1024, [3, 1], [768, 256]),
        (1024, [1, 1, 1], [342, 341, 341]),
        (10, [5, 3, 1], [6, 3, 1]),
        (10, [0.1, 0.2, 0.7], [1, 2, 7]),
        (7, [1e15, 1e15], [4, 3]),
        (1024, [5e-324], [1024]),
    ],
)
def test_quotas_are_by_largest_remainder(size: int, weights: list[float], wanted: list[int]) -> None:
    assert quotas(size, weights) == wanted


def test_every_block_has_each_source_by_its_quota_in_another_order_than_the_next() -> None:
    mix = Mix([7, 2, 1], seed=3)
    orders = []
    for block in range(4):
        found = [mix.place(sample)[0] for sample in range(block * BLOCK, (block + 1) * BLOCK)]
        assert [found.count(source) for source in range(3)] == [717, 205, 102]
        orders.append(found)
    assert len({tuple(order) for order in orders}) == 4
    # A source's samples are spread over the block: none of its sixteenths is without the smallest one.
    assert all(2 in orders[0][begin : begin + 64] for begin in range(0, BLOCK, 64))
    other = Mix([7, 2, 1], seed=4)
    assert [other.place(sample)[0] for sample in range(BLOCK)] not in orders


@given(some.lists(some.integers(1, 9), min_size=1, max_size=4), some.integers(1, 3 * BLOCK))
@settings(max_examples=30, deadline=None)
def test_a_source_gives_each_of_its_rows_once_and_none_is_left_out(weights: list[int], count: int) -> None:
    mix = Mix(weights, seed=5)
    whole = -(-count // BLOCK) * BLOCK
    places = [mix.place(sample) for sample in range(whole)]
    for source in range(len(weights)):
        rows = sorted(row for other, row in places if other == source)
        assert rows == list(range(len(rows)))
    before = Counter(source for source, _ in places[:count])
    assert mix.taken(count) == [before[source] for source in range(len(weights))]


def test_a_sample_far_ahead_is_found_at_once() -> None:
    mix = Mix([3, 1, 2], seed=1)
    assert mix.place(10**15) == mix.place(10**15)
    assert sum(mix.taken(10**15)) == 10**15


LETTERS = {"web": "w", "code": "c"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Of each source, documents that show whose they are."""
    found = {name: tmp_path / f"my {name}.txt" for name in LETTERS}
    for name, letter in LETTERS.items():
        lines = [f"{letter * 60}{number:03}\n" for number in range(100)]  # each 64 tokens, two samples
        found[name].write_text("".join(lines))
    return found


def mixed(files: dict[str, Path], *more: str) -> list[str]:
    return [*(f"data.mix.{name}.dataset={path}" for name, path in files.items()), "data.mix.web.weight=3", *more]


def loaded(folder: Path, *overrides: str) -> Datasets:
    chosen = config(folder, *overrides)
    return datasets.load(chosen, tokenizer.load(chosen))


def letters(rows: np.ndarray) -> str:
    return "".join("w" if (row == ord("w") - 33).sum() > 16 else "c" for row in rows)


def test_rows_are_the_sources_own_and_each_keeps_its_last_documents(tmp_path: Path, files: dict[str, Path]) -> None:
    found = loaded(tmp_path, *mixed(files))
    feed = found.training
    assert isinstance(feed, Mixed)
    assert found.total == 2 * 95 * 64
    assert {event: len(tokens.ids) for event, tokens in found.validation.items()} == {
        "eval-web": 5 * 64, "eval-code": 5 * 64,
    }  # fmt: skip
    whole = letters(feed.rows(range(BLOCK)))
    assert [feed.mix.place(sample)[0] for sample in range(BLOCK)] == ["wc".index(letter) for letter in whole]
    assert feed.mix.taken(BLOCK) == [768, 256]
    assert feed.identity == "web of 6080 tokens, weight 3.0; code of 6080 tokens, weight 1.0"
    assert feed.state() is None


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_samples_are_the_same_on_any_ranks(tmp_path: Path, files: dict[str, Path], ranks: int) -> None:
    whole = loaded(tmp_path, *mixed(files)).training.rows(range(40))
    share, each = 8 // ranks, [loaded(tmp_path / str(rank), *mixed(files)).training for rank in range(ranks)]
    found = [
        each[rank].rows(range(step * 8 + rank * share, step * 8 + (rank + 1) * share))
        for step in range(5)
        for rank in range(ranks)
    ]
    assert np.array_equal(np.concatenate(found), whole)


def test_a_source_has_its_own_column_and_limits_hold_for_each(tmp_path: Path, files: dict[str, Path]) -> None:
    table = tmp_path / "code.csv"
    table.write_text("body,text\n" + f"{'c' * 63},x\n" * 50)
    wanted = mixed(files | {"code": table}, "data.mix.code.column=body", "data.max_train_samples=7")
    found = loaded(tmp_path, *wanted, "data.max_eval_samples=2", f"data.validation={files['web']}")
    assert found.total == 2 * 7 * 32
    assert {event: len(tokens.ids) for event, tokens in found.validation.items()} == {
        "eval": 64, "eval-web": 64, "eval-code": 64,
    }  # fmt: skip
    assert set(letters(found.training.rows(range(64)))) == {"w", "c"}


def test_one_source_alone_has_all_of_its_rows(tmp_path: Path, files: dict[str, Path]) -> None:
    feed = loaded(tmp_path, f"data.mix.web.dataset={files['web']}").training
    assert isinstance(feed, Mixed)
    plain = loaded(tmp_path / "b", f"data.train={files['web']}").training
    order = lambda rows: sorted(map(bytes, rows))  # noqa: E731
    assert order(feed.rows(range(BLOCK))) == order(plain.rows(range(BLOCK)))


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(folder, *overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.txt", None, "the dataset does not exist\n"),
        ("empty.txt", "", "there are too few tokens in data.mix.code\n"),
        ("one.txt", f"{'c' * 99}\n", "there are too few tokens in data.mix.code\n"),
        ("other.csv", "body\nx\n", "there is no column 'text'\n"),
    ],
)
def test_a_source_that_is_none_is_named(tmp_path: Path, files, name: str, content: str | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    told = refusal(tmp_path, *mixed(files | {"code": path}))
    assert told.startswith(said)
    assert str(path) in told


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("data.mix.a.weight=0",), "expected a number above 0"),
        (("data.mix.a.weight=-1",), "expected a number above 0"),
        (("data.mix.a.weight=nan",), "expected a finite number"),
        (("data.mix.a.weight=inf",), "expected a finite number"),
        (("data.mix.a.weight=1e16",), "at most"),
        (("data.mix.a.wieght=1",), "did you mean `weight`?"),
        (("data.mix.A.dataset=x",), "expected a name that matches"),
        (("data.mix.b.weight=2",), "missing: expected text"),
        (("data.train=x.txt",), "beside [data.mix]: a run trains on one of them; leave out data.train"),
        (("data.streaming=true",), "data.streaming works with data.train only; a mix reads tokens from the disk"),
        (("data.mix.test.dataset=x",), "data.mix.test: metrics have another dataset of this name; rename it"),
        (("evaluate.a.dataset=x",), "data.mix.a and evaluate.a: metrics have one eval-a; rename one of them"),
        (("data.mix.b.dataset=y", "data.mix.b.weight=1e4"), "data.mix.a.weight = 1 of 10001 in all is less than one"),
        (("data.mix.a.dataset=hub:nobody",), "data.mix.a.dataset = hub:nobody: expected hub:OWNER/NAME"),
        (("data.mix.a.dataset=~/x",), "dray does not expand ~ and $"),
    ],
)
def test_what_is_no_mix(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_recipe(ROOT / "tests/tiny.toml", ["train.steps=5", "data.mix.a.dataset=x.txt", *overrides])
    assert said in str(refused.value)


def test_a_mix_has_no_epochs() -> None:
    with pytest.raises(ConfigError, match=r"\[data.mix\] needs train.steps, not train.epochs"):
        read_recipe(ROOT / "tests/tiny.toml", ["train.epochs=5", "data.mix.a.dataset=x.txt"])


def test_sources_are_found_beside_the_recipe_and_hub_names_stay() -> None:
    over = ["train.steps=5", "data.mix.a.dataset=x.txt", "data.mix.b.dataset=hub:a/b", "data.mix.c.dataset=builtin"]
    recipe = read_recipe(ROOT / "tests/tiny.toml", over)
    assert [one.dataset for one in recipe.data.mix.values()] == [f"{ROOT}/tests/x.txt", "hub:a/b", "builtin"]
    assert recipe.places() == {"data.mix.a.dataset": f"{ROOT}/tests/x.txt"}
