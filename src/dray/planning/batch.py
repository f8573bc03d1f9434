"""Batch arithmetic: global size = per device x accumulation x ranks, or no run at all."""

from __future__ import annotations

from dray.config.training import Batch
from dray.contract.findings import ConfigError, counted


def divide(batch: Batch, *, world_size: int, at_first: int = 0) -> Batch:
    """Divide the global batch exactly among the ranks, and fill in what the recipe leaves open.

    If there were more ranks `at_first`, each takes no more rows at a time than it did then.
    """
    if at_first > world_size and batch.global_size % world_size == 0:
        before, rows = divide(batch, world_size=at_first).per_device or 1, batch.global_size // world_size
        each = max(count for count in range(1, before + 1) if rows % count == 0)
        return batch.model_copy(update={"per_device": each, "gradient_accumulation_steps": rows // each})
    size, per_device, accumulation = batch.global_size, batch.per_device, batch.gradient_accumulation_steps
    fixed = world_size * (per_device or 1) * (accumulation or 1)
    rest, left_over = divmod(size, fixed)
    both_given = per_device is not None and accumulation is not None
    if left_over or rest == 0 or (both_given and rest != 1):
        raise ConfigError(
            f"global batch {size} is not divisible by {counted(world_size, 'rank')}",
            where="recipe [batch]",
            wanted="global_size = per_device x gradient_accumulation_steps x ranks",
            found=_product(batch, world_size),
            fix=f"set batch.global_size to {_nearest(size, fixed, only=both_given)}, or change another of the factors",
        )
    accumulation = accumulation or (1 if per_device is None else rest)
    return batch.model_copy(update={"per_device": per_device or rest, "gradient_accumulation_steps": accumulation})


def reason(shares: Batch, world_size: int) -> str:
    """The arithmetic as text."""
    each, steps = shares.per_device, shares.gradient_accumulation_steps
    return f"{shares.global_size} = {each} per device x {steps} accumulation x {counted(world_size, 'rank')}"


def _product(batch: Batch, world_size: int) -> str:
    shown = [str(number) if number else "?" for number in (batch.per_device, batch.gradient_accumulation_steps)]
    return f"{batch.global_size} = {shown[0]} x {shown[1]} x {world_size}"


def _nearest(size: int, fixed: int, *, only: bool) -> str:
    if only:
        return str(fixed)
    below = size // fixed * fixed
    return " or ".join(str(number) for number in (below, below + fixed) if number)
