"""The head and the loss as Triton kernels: logits are made tile by tile, and only their sums leave the processor.

One kernel makes each row's logsumexp, its label's logit and its most likely word; programs share the words, and their
figures are merged in a fixed order: no atomics, and the same bits each time. The other makes the logits again for a
slice of the words and writes their gradient, in the products' type. Two matrix products then make the gradients of the
hidden states, summed over slices in 32 bits, and of these words' weights, each written once.

Nothing is tuned by trial: each run computes the same. The same source serves NVIDIA and AMD.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_SLICE = 1 << 27
"""Numbers of the gradient of logits that are there at once."""
_PROGRAMS = 1024
"""Enough to keep the largest GPU at work."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tile(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    hidden, weight, bias, rows, ids, count, size, width,  # noqa: ANN001
    biased: tl.constexpr, precision: tl.constexpr,
    block_rows: tl.constexpr, block_ids: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Logits of these rows for these words."""
    logits = tl.zeros((block_rows, block_ids), dtype=tl.float32)
    for begin in range(0, width, block_width):
        inner = begin + tl.arange(0, block_width)
        left = tl.load(
            hidden + rows.to(tl.int64)[:, None] * width + inner[None, :],
            mask=(rows < count)[:, None] & (inner < width)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + ids.to(tl.int64)[None, :] * width + inner[:, None],
            mask=(ids < size)[None, :] & (inner < width)[:, None],
            other=0.0,
        )
        logits = tl.dot(left, right, logits, input_precision=precision)
    if biased:
        logits += tl.load(bias + ids, mask=ids < size, other=0.0).to(tl.float32)[None, :]
    return logits


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator,unused-ignore]
def summaries(  # type: ignore[no-untyped-def]  # noqa: ANN201, PLR0917
    hidden, weight, bias, labels, tops, sums, named, likely, count, size, width, share,  # noqa: ANN001
    biased: tl.constexpr, precision: tl.constexpr,
    block_rows: tl.constexpr, block_ids: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Of one share of the words: the largest logit and its word, the sum of exp(logit - largest), the label's logit."""
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    first = tl.program_id(1) * share
    label = tl.load(labels + rows, mask=rows < count, other=-1)
    top = tl.full((block_rows,), -3e38, dtype=tl.float32)  # finite: a tile may be of words that a bias of -inf excludes
    total = tl.zeros((block_rows,), dtype=tl.float32)
    of_label = tl.zeros((block_rows,), dtype=tl.float32)
    word = tl.zeros((block_rows,), dtype=tl.int32)
    for begin in range(first, tl.minimum(first + share, size), block_ids):
        ids = begin + tl.arange(0, block_ids)
        logits = _tile(
            hidden, weight, bias, rows, ids, count, size, width,
            biased, precision, block_rows, block_ids, block_width,
        )  # fmt: skip
        logits = tl.where((ids < size)[None, :], logits, float("-inf"))
        of_label += tl.sum(tl.where(ids[None, :] == label[:, None], logits, 0.0), axis=1)
        here = tl.max(logits, axis=1)
        word = tl.where(here > top, begin + tl.argmax(logits, axis=1).to(tl.int32), word)
        larger = tl.maximum(top, here)
        total = total * tl.exp(top - larger) + tl.sum(tl.exp(logits - larger[:, None]), axis=1)
        top = larger
    out = tl.program_id(1).to(tl.int64) * count + rows
    tl.store(tops + out, top, mask=rows < count)
    tl.store(sums + out, total, mask=rows < count)
    tl.store(named + out, of_label, mask=rows < count)
    tl.store(likely + out, word, mask=rows < count)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator,unused-ignore]
def gradients(  # type: ignore[no-untyped-def]  # noqa: ANN201, PLR0917
    hidden, weight, bias, labels, logsumexp, change, count, size, width, first, share,  # noqa: ANN001
    biased: tl.constexpr, precision: tl.constexpr,
    block_rows: tl.constexpr, block_ids: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient of logits, of `share` words from `first` on: softmax - 1 at the label; 0 if ignored."""
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    places = tl.program_id(1) * block_ids + tl.arange(0, block_ids)
    ids = first + places
    label = tl.load(labels + rows, mask=rows < count, other=-1)
    normal = tl.load(logsumexp + rows, mask=rows < count, other=0.0)
    logits = _tile(
        hidden, weight, bias, rows, ids, count, size, width,
        biased, precision, block_rows, block_ids, block_width,
    )  # fmt: skip
    found = tl.exp(logits - normal[:, None]) - tl.where(ids[None, :] == label[:, None], 1.0, 0.0)
    found = tl.where((label >= 0)[:, None], found, 0.0)
    tl.store(
        change + rows.to(tl.int64)[:, None] * share + places[None, :],
        found.to(change.dtype.element_ty),
        mask=(rows < count)[:, None] & (places < share)[None, :],
    )


def constants(dtype: torch.dtype, *, amd: bool, tf32: bool = False) -> dict[str, Any]:
    """Of both kernels: for A100, H100 and MI250X they fit into shared memory and registers (tests compile them)."""
    wide = dtype == torch.float32
    return {
        "precision": "tf32" if wide and tf32 and not amd else "ieee",
        "block_rows": 64 if wide else 128,
        "block_ids": 64 if wide else 128,
        "block_width": 32 if wide else 64,
        "num_warps": 4 if wide else 8,
        "num_stages": 2 if amd else 3,
    }


def sources(architecture: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[Any, dict[str, int]]]:
    """Both kernels as training starts them, with their options, for a compiler without a GPU."""
    if architecture == "7.0":  # dray refuses them there: without tensor cores a tile spills
        return
    fixed = constants(dtype, amd=architecture.startswith("gfx"), tf32=True) | {"biased": True}
    options = {name: fixed.pop(name) for name in ("num_warps", "num_stages")}
    own = "*" + {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    types = dict.fromkeys(("hidden", "weight", "bias", "change"), own)
    types |= dict.fromkeys(("tops", "sums", "named", "logsumexp"), "*fp32")
    types |= {"labels": "*i64", "likely": "*i32"} | dict.fromkeys(fixed, "constexpr")
    for kernel in (summaries, gradients):
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        # Tensors begin at multiples of 16, and a model's width is one.
        even = [
            n for n, (name, kind) in enumerate(signature.items()) if "*" in kind or name in ("width", "share", "first")
        ]
        attributes = {(place,): [["tt.divisibility", 16]] for place in even}
        yield triton.compiler.ASTSource(kernel, signature, constexprs=fixed, attrs=attributes), options


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    predicted: torch.Tensor,
    changes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """As dray.train.kernels.chunked does it."""
    hidden, weight, count, size = hidden.contiguous(), weight.contiguous(), len(hidden), len(weight)
    if not count:
        return torch.zeros((), dtype=torch.float32, device=hidden.device)
    given = hidden, weight, weight if bias is None else bias, labels
    tf32 = torch.get_float32_matmul_precision() != "highest"
    fixed = constants(hidden.dtype, amd=torch.version.hip is not None, tf32=tf32) | {"biased": bias is not None}
    row_blocks = triton.cdiv(count, fixed["block_rows"])
    share = triton.cdiv(size, max(1, _PROGRAMS // max(1, row_blocks)))
    share = triton.cdiv(share, fixed["block_ids"]) * fixed["block_ids"]
    parts = triton.cdiv(size, share)
    tops, sums, named = torch.empty(3, parts, count, dtype=torch.float32, device=hidden.device)
    likely = torch.empty(parts, count, dtype=torch.int32, device=hidden.device)
    summaries[(row_blocks, parts)](*given, tops, sums, named, likely, count, size, hidden.shape[1], share, **fixed)
    logsumexp = (tops + sums.log()).logsumexp(0)
    if len(predicted):
        predicted.copy_(likely.gather(0, tops.argmax(0, keepdim=True))[0])
    if any(map(len, changes)):
        _backward(given, logsumexp, changes, fixed)
    loss: torch.Tensor = (logsumexp - named.sum(0)).masked_fill(labels < 0, 0).sum()
    return loss


def _backward(
    given: tuple[torch.Tensor, ...],
    logsumexp: torch.Tensor,
    changes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    fixed: dict[str, Any],
) -> None:
    """A slice of the words at a time."""
    hidden, weight, (of_hidden, of_weight, of_bias) = given[0], given[1], changes
    count, size, block = len(hidden), len(weight), fixed["block_ids"]
    share = triton.cdiv(triton.cdiv(size, max(1, triton.cdiv(size * count, _SLICE))), block) * block
    change = torch.empty(count, share, dtype=hidden.dtype, device=hidden.device)
    for first in range(0, size, share):
        ids = slice(first, min(first + share, size))
        part = change[:, : ids.stop - first]
        grid = triton.cdiv(count, fixed["block_rows"]), triton.cdiv(part.shape[1], block)
        gradients[grid](*given, logsumexp, change, count, size, hidden.shape[1], first, share, **fixed)
        if len(of_hidden):
            of_hidden += _product(part, weight[ids])
        if len(of_weight):
            of_weight[ids] = _product(part.t(), hidden)
        if len(of_bias):
            of_bias[ids] = part.sum(0, dtype=of_bias.dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """In 32 bits where torch has that: its builds for ROCm and CPUs refuse it."""
    if left.is_cuda and torch.version.hip is None and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right
