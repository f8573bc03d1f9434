"""fp16's loss scale: small gradients are made large enough to be seen, and steps that became too large are left out."""

from __future__ import annotations

from typing import Any

from dray.contract.findings import DrayError

MINIMUM, _GROWTH_INTERVAL = 1.0, 1000


class Scaler:
    """Doubles after so many good steps, halves after a bad one."""

    def __init__(self, scale: float) -> None:
        self.scale, self.skipped, self._good = scale, 0, 0

    def good(self) -> None:
        """A step was taken."""
        self._good += 1
        if self._good % _GROWTH_INTERVAL == 0:
            self.scale *= 2

    def bad(self) -> None:
        """A step was left out."""
        if self.scale <= MINIMUM:
            exhausted(self.scale)
        self.skipped, self._good, self.scale = self.skipped + 1, 0, self.scale / 2

    def state(self) -> list[Any]:
        """JSON that `load` understands."""
        return [self.scale, self.skipped, self._good]

    def load(self, state: list[Any]) -> None:
        """Go on from there."""
        self.scale, self.skipped, self._good = state


def exhausted(scale: float) -> None:
    """No scale is small enough: the gradients themselves are not finite."""
    raise DrayError(
        "fp16's loss scale is at its minimum, and the gradients are still not finite",
        wanted="finite gradients",
        found=f"Inf or NaN at loss scale {scale:g}",
        fix="train.precision = bf16, a smaller train.lr, or more train.warmup_steps",
    )
