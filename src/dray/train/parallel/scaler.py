"""fp16's loss scale: it lifts small gradients into fp16's range, and steps whose gradients overflow are skipped."""

from __future__ import annotations

from typing import Any

import torch

from dray.contract.findings import DrayError

MINIMUM, _GROWTH_INTERVAL = 1.0, 1000


class Scaler:
    """A scale that doubles after 1000 good steps, and halves after a bad one.

    The device computes that, and no step waits for it: the host has the numbers that it last read.
    """

    def __init__(self, scale: float, device: torch.device) -> None:
        self.numbers = torch.zeros(4, dtype=torch.float64, device=device)
        """The scale; skipped steps; good steps since the last of these; steps that overflowed at the smallest scale."""
        self.load([scale, 0, 0])

    def update(self, norm: torch.Tensor) -> torch.Tensor:
        """Count a step with this norm; return 1 if it is skipped, as the `found_inf` of torch's fused optimizers."""
        good, (scale, skipped, since, exhausted) = norm.isfinite(), self.numbers
        at_minimum, since = scale <= MINIMUM, (since + 1) * good
        grown = torch.where(since % _GROWTH_INTERVAL == 0, scale * 2, scale)
        shrunk = torch.where(at_minimum, scale, scale / 2)
        after_good = torch.stack([grown, skipped, since, exhausted])
        after_bad = torch.stack([shrunk, skipped + ~at_minimum, since, exhausted + at_minimum])
        self.numbers.copy_(torch.where(good, after_good, after_bad))
        return (~good).float()

    def observe(self, scale: float, skipped: float, since: float, exhausted: float) -> None:
        """Take the numbers that the host has read; end the run if a step overflowed at the smallest scale."""
        self.scale, self.skipped, self._since = scale, int(skipped), int(since)
        if exhausted:
            refuse(scale)

    def state(self) -> list[Any]:
        """Return what `load` takes, as the host last read it."""
        return [self.scale, self.skipped, self._since]

    def load(self, state: list[Any]) -> None:
        """Go on from what `state` has returned."""
        scale, skipped, since = state
        self.observe(scale, skipped, since, 0)
        self.numbers.copy_(torch.tensor([scale, skipped, since, 0], dtype=torch.float64))


def refuse(scale: float) -> None:
    """End the run: the gradients are not finite at the smallest scale either."""
    raise DrayError(
        "fp16's loss scale is at its minimum, and the gradients are still not finite",
        wanted="finite gradients",
        found=f"Inf or NaN at loss scale {scale:g}",
        fix="train.precision = bf16, a smaller train.lr, or more train.warmup_steps",
    )
