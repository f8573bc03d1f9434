"""The makers' figures of GPUs, from gpus.toml, where each has its source."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU, with its maker's figures."""

    name: str
    """A regular expression for the whole name that torch reports."""
    fp16: float
    """TFLOP/s of dense matrix products in fp16."""
    bf16: float
    """The same in bf16; 0 where the GPU emulates it."""
    bandwidth: float
    """Memory bandwidth, in GB/s."""
    source: str


@cache
def known() -> tuple[Gpu, ...]:
    """All that gpus.toml has."""
    content = Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
    return tuple(Gpu(**gpu) for gpu in tomllib.loads(content)["gpu"])


def find(device: str) -> Gpu | None:
    """The GPU with this name; None if it is a part of a GPU, or not listed."""
    return next((gpu for gpu in known() if re.fullmatch(gpu.name, device)), None)
