"""A mix: each source has its share in every block, gives each of its rows once, and ends where it was said to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dray.contract.findings import ConfigError
from dray.contract.mix import BLOCK, quotas
from dray.runs.prepare import read_recipe
from helpers import ROOT

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import numpy as np

from dray.train.data import datasets, tokenizer
from dray.train.data.datasets import Datasets
from dray.train.data.feeds import Mixed
from dray.train.data.mix import FOREVER, Mix, Part
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
    mix = Mix([Part(7), Part(2), Part(1)], seed=3)
    assert mix.end >= FOREVER
    orders = []
    for block in range(4):
        found = [mix.place(sample)[0] for sample in range(block * BLOCK, (block + 1) * BLOCK)]
        assert [found.count(source) for source in range(3)] == [717, 205, 102]
        orders.append(found)
    assert len({tuple(order) for order in orders}) == 4
    # A source's samples are spread over the block: none of its sixteenths is without the smallest one.
    assert all(2 in orders[0][begin : begin + 64] for begin in range(0, BLOCK, 64))
    other = Mix([Part(7), Part(2), Part(1)], seed=4)
    assert [other.place(sample)[0] for sample in range(BLOCK)] not in orders


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        ([Part(1), Part(1)], [FOREVER, FOREVER]),
        ([Part(3, rows=1000), Part(1)], [1334, FOREVER]),
        ([Part(3, until=100), Part(1)], [100, FOREVER]),
        ([Part(1, rows=512), Part(1)], [1024, FOREVER]),
        ([Part(1, rows=10), Part(2, rows=2000)], [30, 2010]),
        ([Part(1, until=1500), Part(1, rows=600, until=1400), Part(2, rows=1900)], [1500, 1400, 2633]),
        ([Part(5, rows=3), Part(3, rows=2), Part(1, rows=1)], [6, 6, 6]),
        ([Part(1, rows=700)], [700]),
    ],
)
def test_a_source_ends_where_it_is_to_and_gives_each_row_once(parts: list[Part], ends: list[int]) -> None:
    mix = Mix(parts, seed=1)
    assert (mix.ends, mix.end) == (ends, max(ends))
    count = min(mix.end, 5 * BLOCK)
    found = [mix.place(sample) for sample in range(count)]
    for source, part in enumerate(parts):
        samples = [sample for sample, (one, _) in enumerate(found) if one == source]
        rows = sorted(row for one, row in found if one == source)
        assert max(samples) < min(ends[source], part.until)
        assert len(rows) == len(set(rows))
        if ends[source] <= count:
            assert rows == list(range(len(rows)))  # none is left out
            assert len(rows) == part.rows or ends[source] == part.until
    for samples in {0, 1, 99, 100, 101, 1023, 1024, 1025, 1500, 2047, count} & {*range(count + 1)}:
        before = Counter(source for source, _ in found[:samples])
        assert mix.taken(samples) == [before[source] for source in range(len(parts))]


@given(
    some.lists(some.tuples(some.integers(1, 9), some.integers(0, 1500), some.integers(0, 3000)), min_size=1, max_size=4)
)
@settings(max_examples=30, deadline=None)
def test_any_mix_gives_each_row_once(chosen: list[tuple[int, int, int]]) -> None:
    parts = [Part(weight, rows or FOREVER, until or FOREVER) for weight, rows, until in chosen]
    mix = Mix(parts, seed=5)
    count = min(mix.end, 3 * BLOCK)
    found = [mix.place(sample) for sample in range(count)]
    assert len(set(found)) == count
    counts = Counter(source for source, _ in found)
    for source, part in enumerate(parts):
        assert counts[source] <= part.rows
        assert max((sample for sample, (one, _) in enumerate(found) if one == source), default=-1) < part.until
    assert mix.taken(count) == [counts[source] for source in range(len(parts))]
    # Where none has ended yet, each block has the quotas.
    if count >= BLOCK and min(mix.ends) > BLOCK:
        first = Counter(source for source, _ in found[:BLOCK])
        assert [first[source] for source in range(len(parts))] == quotas(BLOCK, [part.weight for part in parts])


def test_a_sample_far_ahead_is_found_at_once() -> None:
    mix = Mix([Part(3, rows=10**12), Part(1), Part(2, until=10**9 + 7)], seed=1)
    assert len(mix.stretches) <= 7
    place = mix.place(10**15)
    assert place == mix.place(10**15)
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
    found = loaded(tmp_path, *mixed(files, "data.mix.code.repeat=2", "data.mix.web.until=300"))
    feed = found.training
    assert isinstance(feed, Mixed)
    assert found.total == 2 * 95 * 64
    assert {event: len(tokens.ids) for event, tokens in found.validation.items()} == {
        "eval-web": 5 * 64, "eval-code": 5 * 64,
    }  # fmt: skip
    whole = letters(feed.rows(range(BLOCK)))
    assert [feed.mix.place(sample)[0] for sample in range(BLOCK)] == ["wc".index(letter) for letter in whole]
    # code has two epochs of 190 samples; web goes on alone, until step 300 of 8 samples.
    assert feed.mix.ends == [2400, 1520]
    assert feed.mix.taken(2400)[1] == 380
    assert feed.shares(range(BLOCK)) == {"web": 0.75, "code": 0.25}
    assert feed.identity == "web of 6080 tokens, weight 3.0, until 300; code of 6080 tokens, weight 1.0, repeat 2"
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
    feed = loaded(tmp_path, f"data.mix.web.dataset={files['web']}", "data.mix.web.repeat=1", "train.steps=23").training
    assert isinstance(feed, Mixed)
    assert feed.mix.end == 190
    plain = loaded(tmp_path / "b", f"data.train={files['web']}").training
    order = lambda rows: sorted(map(bytes, rows))  # noqa: E731
    assert order(feed.rows(range(190))) == order(plain.rows(range(190)))


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(folder, *overrides)
    return str(refused.value)


def test_a_mix_that_ends_before_the_run_is_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    over = mixed(files, "data.mix.code.repeat=2", "data.mix.web.until=10", "train.steps=100")
    assert refusal(tmp_path, *over) == (
        "the mix ends before the run does\n"
        "  wanted: 800 samples: 100 steps (train.steps) of 8\n"
        "  found:  440 samples; web ends after 80, code ends after 440\n"
        "  fix:    train.steps=55, or remove repeat and until from a source"
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.txt", None, "the dataset does not exist\n"),
        ("empty.txt", "", "the mix.code dataset is too short\n"),
        ("one.txt", f"{'c' * 99}\n", "the mix.code dataset is too short\n"),
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
        (("data.mix.a.repeat=-1",), "expected a whole number of at least 0"),
        (("data.mix.a.repeat=1.5",), "expected a whole number of at least 0"),
        (("data.mix.a.until=-5",), "expected a whole number of at least 0"),
        (("data.mix.a.wieght=1",), "did you mean `weight`?"),
        (("data.mix.A.dataset=x",), "expected a name that matches"),
        (("data.mix.b.weight=2",), "missing: expected text"),
        (("data.train=x.txt",), "beside [data.mix]: a run trains on one of them; leave out data.train"),
        (("data.streaming=true",), "data.streaming works with data.train only; a mix reads tokens from the disk"),
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
