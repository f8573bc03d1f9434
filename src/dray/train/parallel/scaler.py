"""fp16's loss scale: small gradients are made large enough to be seen, and steps that became too large are left out."""

from __future__ import annotations

from typing import Any

import torch

from dray.contract.findings import DrayError

MINIMUM, _GROWTH_INTERVAL = 1.0, 1000


class Scaler:
    """Doubles after so many good steps, halves after a bad one.

    That is decided on the device, and no step waits for it. The host has the numbers as it last read them.
    """

    def __init__(self, scale: float, device: torch.device) -> None:
        self.numbers = torch.zeros(4, dtype=torch.float64, device=device)
        """The scale, how many steps were left out, good ones since the last of these, and whether no scale helps."""
        self.load([scale, 0, 0])

    def update(self, norm: torch.Tensor) -> torch.Tensor:
        """After a step with this norm; whether it is left out, as torch's fused optimizers take it."""
        good, (scale, skipped, since, exhausted) = norm.isfinite(), self.numbers
        least, since = scale <= MINIMUM, (since + 1) * good
        bad = torch.stack([torch.where(least, scale, scale / 2), skipped + ~least, since, exhausted + least])
        grown = torch.where(since % _GROWTH_INTERVAL == 0, scale * 2, scale)
        self.numbers.copy_(torch.where(good, torch.stack([grown, skipped, since, exhausted]), bad))
        return (~good).float()

    def see(self, scale: float, skipped: float, since: float, exhausted: float) -> None:
        """The numbers, which the caller has read."""
        self.scale, self.skipped, self._since = scale, int(skipped), int(since)
        if exhausted:
            refuse(scale)

    def state(self) -> list[Any]:
        """JSON that `load` understands, as the host last read it."""
        return [self.scale, self.skipped, self._since]

    def load(self, state: list[Any]) -> None:
        """Go on from there."""
        scale, skipped, since = state
        self.see(scale, skipped, since, 0)
        self.numbers.copy_(torch.tensor([scale, skipped, since, 0], dtype=torch.float64))


def refuse(scale: float) -> None:
    """End the run: the gradients are not finite at the smallest scale either."""
    raise DrayError(
        "fp16's loss scale is at its minimum, and the gradients are still not finite",
        wanted="finite gradients",
        found=f"Inf or NaN at loss scale {scale:g}",
        fix="train.precision = bf16, a smaller train.lr, or more train.warmup_steps",
    )
