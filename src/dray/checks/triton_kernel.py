"""The smallest Triton kernel. It has a file of its own because Triton reads its source, and its annotations as code."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def add(left, right, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """One block of out = left + right."""
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < count
    tl.store(out + offsets, tl.load(left + offsets, mask=mask) + tl.load(right + offsets, mask=mask), mask=mask)


def source() -> Any:  # noqa: ANN401  Triton's own
    """The kernel with the types of its arguments."""
    signature = {"left": "*fp32", "right": "*fp32", "out": "*fp32", "count": "i32", "block": "constexpr"}
    return triton.compiler.ASTSource(add, signature, constexprs={"block": 256})
