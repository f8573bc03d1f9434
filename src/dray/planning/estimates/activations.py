"""Estimates the activations kept for the backward pass, from a model's configuration alone: it needs no torch.

Calibrated against `dray.train.activations`, which counts them in the model itself; tests compare the two.
Numbers are bytes. Under autocast norms stay in 32 bits, and every product makes itself a copy in 16.
"""

from __future__ import annotations

from dataclasses import dataclass

from dray.planning.estimates.model_shape import Block

_WRITTEN_OUT = ("gelu_new", "gelu_fast")  # in single operations, of which each keeps something
_LOSS = 12
"""Bytes of a logit in eager mode: its logarithm and two gradients, in 32 bits."""

_PARTS, _CHUNK, _CHUNK_COMPILED = 8, 1 << 27, 1 << 28
"""The fewest parts of chunked logits, and the most numbers of one part: train/kernels/chunked.py has them."""


@dataclass(frozen=True)
class Use:
    """How a recipe runs the model."""

    length: int
    products: int
    """Bytes of a number in matrix products."""
    residual: int
    """Bytes of a number between the layers, which has the type of the weights that compute."""
    autocast: bool
    compiled: bool = False
    checkpointed: bool = False
    eager: bool = False
    masked: bool = False


def kept(block: Block, layers: int, use: Use) -> float:
    """Bytes of the activations for each row of tokens."""
    between = _norm(block, use) + use.products + (0 if use.compiled else block.head)
    outside = use.length * block.hidden * between
    layer = use.length * _token(block, use)
    if use.checkpointed:
        return outside + layers * use.length * block.hidden * use.residual + layer
    return outside + layers * layer


def head(loss: str, tokens: float, vocabulary: int, hidden: int, use: Use) -> float:
    """Bytes at the beginning of the backward pass: of whole logits, or as train/kernels makes the loss in parts.

    In parts: those of one part, and of the gradient of the head's weight, which is computed with the loss.
    """
    size = tokens * vocabulary
    each = 2 * use.products if use.compiled else _LOSS  # compiled: the logit and its gradient
    whole = size * each
    if loss == "chunked":
        part = each * (_CHUNK_COMPILED if use.compiled else _CHUNK)
        return min(whole / _PARTS, part) + 4.0 * vocabulary * hidden
    return whole


def _token(block: Block, use: Use) -> float:
    """Bytes of one layer for each token."""
    x, h = use.products, block.hidden
    # The output of a norm is kept as the input of what follows: cast for each product, if it is in 32 bits.
    copies = use.autocast and not use.compiled and not (block.gated and use.residual == 2)
    inputs = ((1 if block.fused else 3) + (2 if block.gated else 1) if copies else 2) * x * h
    masked = use.masked or 0 < block.window < use.length
    # Only without a mask do kernels take grouped heads as they are.
    attention = (2 * block.width + 2 * (block.width if masked else block.shared)) * x
    if block.eager or use.eager:
        attention += block.heads * use.length * (4 + x if x < 4 else 4)
    elif masked:
        attention += use.length * x
    if block.normed:
        attention += (block.width + block.shared) * (x if use.compiled else 4 + x)
    return 2 * _norm(block, use) * h + inputs + attention + block.inner * _between(block, use) + 2 * block.dropout * h


def _norm(block: Block, use: Use) -> int:
    """Bytes of one norm for each number, without its output."""
    if use.compiled:
        return use.residual
    if block.gated:
        return 4 + use.residual  # RMSNorm: its input in 32 bits, and what its weights are multiplied with
    return 4 if use.autocast else use.residual


def _between(block: Block, use: Use) -> int:
    """Bytes between the linear layers, for each number there."""
    x = use.products
    if block.gated:
        return 3 * x if use.compiled else 4 * x
    if block.activation == "relu":
        return x
    if block.activation in _WRITTEN_OUT and not use.compiled:
        return 16 if use.autocast else 5 * x
    return 2 * x
