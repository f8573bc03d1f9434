"""Every token once a pass, in an order that no number of ranks changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dray.train.data.order import Order, indices, permuted


@given(some.integers(1, 3000), some.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_a_permutation_has_everything_once(count: int, seed: int) -> None:
    assert sorted(permuted(index, count, seed) for index in range(count)) == list(range(count))


def test_seeds_give_other_orders_and_neighbours_part() -> None:
    orders = {tuple(permuted(index, 100, seed) for index in range(100)) for seed in range(50)}
    assert len(orders) == 50
    kept = [sum(permuted(index, 1000, seed) == index for index in range(1000)) for seed in range(20)]
    assert max(kept) < 10
    followed = sum(permuted(i + 1, 1000, 7) == permuted(i, 1000, 7) + 1 for i in range(999))
    assert followed < 10


@pytest.mark.parametrize(("total", "block"), [(1000, 128), (1024, 128), (97, 128), (128, 128), (1, 5), (257, 2)])
def test_no_token_is_lost(total: int, block: int) -> None:
    """Over as many passes as there are tokens in a block, the blocks come out even: each token as often as passes."""
    order = Order(total, block, seed=3)
    samples = order.first(block)
    assert samples * block == block * total
    seen: Counter[int] = Counter()
    for sample in range(samples):
        start = order.start(sample)
        seen.update((start + offset) % total for offset in range(block))
    assert set(seen.values()) == {block}
    assert len(seen) == total


def test_a_pass_sees_each_of_its_blocks_once_in_another_order_than_the_next() -> None:
    order = Order(128 * 50, 128, seed=1)
    passes = [[order.start(sample) for sample in range(50 * epoch, 50 * (epoch + 1))] for epoch in range(3)]
    for one in passes:
        assert sorted(one) == list(range(0, 128 * 50, 128))
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize(
    ("world", "per_device", "accumulation"), [(1, 8, 1), (2, 4, 1), (4, 2, 1), (2, 1, 4), (1, 1, 8)]
)
def test_a_step_has_the_same_samples_on_any_number_of_ranks(world: int, per_device: int, accumulation: int) -> None:
    for step in (0, 1, 17):
        seen = [
            sample
            for micro in range(accumulation)
            for rank in range(world)
            for sample in indices(step, micro, rank, world=world, per_device=per_device, accumulation=accumulation)
        ]
        assert seen == list(range(step * 8, step * 8 + 8))
