"""Ranks that have the same of a checkpoint: each number is read once, and all have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dray.train.checkpoint.shards import MismatchError, Reader, whole_shards
from dray.train.checkpoint.staging import Staging
from dray.train.parallel.replicated_checkpoint import Replicas
from ranks import World

pytestmark = pytest.mark.torch


torch.manual_seed(1)
TENSORS = {
    "wide": torch.randn(40, 7),
    "turned": torch.randn(6, 9).t(),
    "half": torch.randn(33).bfloat16(),
    "masks": torch.rand(50) > 0.5,
    "count": torch.tensor(77),
    "none": torch.empty(0, 3),
}
NUMBERS = sum(one.numel() for one in TENSORS.values())


def others() -> dict[str, torch.Tensor]:
    """Of the same shapes and orders in memory."""
    return {name: torch.zeros_like(one) for name, one in TENSORS.items()}


class Counting(Reader):
    """How many numbers it has read."""

    read = 0

    def _copy(self, name: str, begin: int, values: torch.Tensor) -> None:
        self.read += values.numel()
        super()._copy(name, begin, values)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    held = Staging(torch.device("cpu")).fill(whole_shards("others", TENSORS), 0).write(tmp_path)
    return tmp_path, held["tensors"]


def same(own: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one, own[name]) for name, one in TENSORS.items())


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_each_number_is_read_by_one_rank_and_sent_to_all(made: tuple[Path, Any], count: int) -> None:
    def do(rank: int) -> tuple[bool, int]:
        own, reader = others(), Counting(*made)
        Replicas(rank, count).fill(whole_shards("others", own), reader)
        return same(own), reader.read

    found = (world := World(count)).each(do)
    assert [one[0] for one in found] == [True] * count
    assert sum(read for _, read in found) == NUMBERS
    assert max(read for _, read in found) == -(-NUMBERS // min(count, 64))
    assert len([read for _, read in found if read]) == min(count, 64)
    assert all(sum(heard) <= sum(one.nbytes for one in TENSORS.values()) for heard in world.heard)


def test_each_of_two_groups_reads_for_itself(made: tuple[Path, Any]) -> None:
    """As with fsdp over the ranks of a node, and a copy on each of three."""

    def do(rank: int) -> bool:
        own, group = others(), range(rank % 2, 6, 2)
        Replicas(rank // 2, 3, group).fill(whole_shards("others", own), Reader(*made))  # type: ignore[arg-type]
        return same(own)

    assert World(6).each(do) == [True] * 6


@pytest.mark.parametrize(("name", "shape"), [("masks", (49,)), ("other", (2,))])
def test_a_tensor_that_is_not_of_this_model_is_refused_on_all_ranks(
    made: tuple[Path, Any], name: str, shape: tuple[int, ...]
) -> None:
    def do(rank: int) -> None:
        own = {**others(), name: torch.empty(shape)}
        Replicas(rank, 3).fill(whole_shards("others", own), Reader(*made))

    assert [type(one) for one in World(3).each(do)] == [MismatchError] * 3
