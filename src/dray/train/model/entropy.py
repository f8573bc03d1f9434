"""The cross entropy of logits, in plain torch or compiled.

Compiled it is two kernels: the loss reads logits of 16 bits; the gradient reads them again and is written in 16 bits.
In plain torch each step is a pass in 32 bits. Labels of -100 are ignored, as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional


def exact(tensor: torch.Tensor) -> torch.dtype:
    """The type of its sums."""
    return torch.promote_types(tensor.dtype, torch.float32)


def cross_entropy(*, compiled: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function from logits and labels to the sum of losses."""
    return _compiled() if compiled else _sum


def _sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.to(exact(logits)), labels, reduction="sum")


@cache
def _compiled() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """One for all heads. From the second number of rows on, it is compiled for any."""
    return torch.compile(_sum)
