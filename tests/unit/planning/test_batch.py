"""Batch arithmetic comes out exactly or not at all."""

from __future__ import annotations

import pytest

from dray.config.training import Batch
from dray.contract.findings import ConfigError
from dray.planning.world import divide


@pytest.mark.parametrize(
    ("batch", "world", "shares"),
    [
        ({"global_size": 16, "per_device": 4}, 4, (4, 1)),
        ({"global_size": 16, "per_device": 4}, 2, (4, 2)),
        ({"global_size": 16}, 4, (4, 1)),
        ({"global_size": 16, "gradient_accumulation_steps": 2}, 4, (2, 2)),
        ({"global_size": 16, "per_device": 2, "gradient_accumulation_steps": 2}, 4, (2, 2)),
        ({"global_size": 1}, 1, (1, 1)),
    ],
)
def test_it_comes_out(batch: dict[str, int], world: int, shares: tuple[int, int]) -> None:
    found = divide(Batch(**batch), world_size=world)
    assert (found.per_device, found.gradient_accumulation_steps) == shares


@pytest.mark.parametrize(
    ("batch", "world", "product", "nearest"),
    [
        ({"global_size": 16, "per_device": 3}, 4, "16 = 3 x ? x 4", "12 or 24"),
        ({"global_size": 2, "per_device": 4}, 4, "2 = 4 x ? x 4", "16"),
        ({"global_size": 16}, 3, "16 = ? x ? x 3", "15 or 18"),
        ({"global_size": 16, "per_device": 2, "gradient_accumulation_steps": 1}, 4, "16 = 2 x 1 x 4", "8"),
        ({"global_size": 512, "per_device": 8, "gradient_accumulation_steps": 3}, 16, "512 = 8 x 3 x 16", "384"),
    ],
)
def test_a_batch_that_is_not_divisible(batch: dict[str, int], world: int, product: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as refused:
        divide(Batch(**batch), world_size=world)
    assert str(refused.value) == (
        f"global batch {batch['global_size']} is not divisible by {world} ranks\n"
        "  where:  recipe [batch]\n"
        "  wanted: global_size = per_device x gradient_accumulation_steps x ranks\n"
        f"  found:  {product}\n"
        f"  fix:    set batch.global_size to {nearest}, or change another of the factors"
    )
