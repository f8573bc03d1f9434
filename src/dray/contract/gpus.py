"""The makers' figures of GPUs, from gpus.toml, where each has its source."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """What its maker says."""

    name: str
    """A pattern of the whole name that torch gives it."""
    fp16: float
    """Dense matrix products, in TFLOP/s."""
    bf16: float
    """The same; 0 where they are emulated."""
    bandwidth: float
    """Of its memory, in GB/s."""
    source: str


@cache
def known() -> tuple[Gpu, ...]:
    """All that gpus.toml has."""
    content = Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
    return tuple(Gpu(**gpu) for gpu in tomllib.loads(content)["gpu"])


def find(device: str) -> Gpu | None:
    """The GPU with this name; none for a part of one, or one that is not listed."""
    return next((gpu for gpu in known() if re.fullmatch(gpu.name, device)), None)
