"""train.deterministic: the variables with which two runs agree to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dray.config.recipe import Recipe


class Setting(NamedTuple):
    """A variable, the values with which runs agree (the first is dray's own), and why it must have one of them."""

    name: str
    values: tuple[str, ...]
    why: str


_GPU = (
    Setting("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"), "cuBLAS would sum in an order that its streams decide"),
    Setting("NCCL_ALGO", ("Ring", "Tree"), "NCCL would choose an algorithm by size, and a switch may sum in any order"),
    Setting("NCCL_PROTO", ("Simple", "LL", "LL128"), "NCCL would choose a protocol by size and topology"),
)
_COMPILED = (
    Setting("TORCHINDUCTOR_DETERMINISTIC", ("1",), "Inductor would choose the reduction that was fastest just now"),
    *(
        Setting(f"TORCHINDUCTOR_{name}", ("0",), "tuning would choose the kernel that was fastest just now")
        for name in ("COORDINATE_DESCENT_TUNING", "MAX_AUTOTUNE", "MAX_AUTOTUNE_GEMM", "MAX_AUTOTUNE_POINTWISE")
    ),
)
_FLASH = Setting("FLASH_ATTENTION_DETERMINISTIC", ("1",), "flash attention would add gradients by atomics")
_ANALOG = Setting("AIHWKIT_USE_TRITON", ("",), "aihwkit-lightning's Triton kernels would add by atomics")


def settings(recipe: Recipe) -> Iterator[Setting]:
    """The settings for this recipe. On a CPU sums have one order without any."""
    train = recipe.train
    if train is None or not train.deterministic:
        return
    if train.compile:
        yield from _COMPILED
    if recipe.image != "cpu":
        yield from _GPU
        if recipe.model.attn_implementation == "flash_attention_2":
            yield _FLASH
        if recipe.has_analog:
            yield _ANALOG
