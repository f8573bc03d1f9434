"""Estimates the activations kept for the backward pass, from a model's configuration alone: it needs no torch.

Calibrated against what transformers' models keep; tests compare the two.
Numbers are bytes. Under autocast norms stay in 32 bits, and every product makes itself a copy in 16.
"""

from __future__ import annotations

from typing import NamedTuple

from dray.planning.estimates.model_shape import Shape

_WRITTEN_OUT = ("gelu_new", "gelu_fast")  # in single operations, of which each keeps something
_BERT_HEAD = 9  # numbers for each hidden one, which its head keeps before the logits
_LOSS = 12
"""Bytes of a logit in eager mode: its logarithm and two gradients, in 32 bits."""
_PARTS, _CHUNK, _CHUNK_COMPILED = 8, 1 << 27, 1 << 28
"""The fewest parts of chunked logits, and the most numbers of one part: train/model/head.py has them."""


class Use(NamedTuple):
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


def kept(model: Shape, use: Use) -> float:
    """Bytes of the activations for each row of tokens."""
    head = _BERT_HEAD if model.kind == "bert" and not use.compiled else 0
    outside = use.length * model.hidden * (_norm(model, use) + use.products + head)
    layer = use.length * _token(model, use)
    if use.checkpointed:
        return outside + model.layers * use.length * model.hidden * use.residual + layer
    return outside + model.layers * layer


def head(loss: str, tokens: float, vocabulary: int, hidden: int, use: Use) -> float:
    """Bytes at the beginning of the backward pass: of whole logits, or as train/model/head.py makes the loss in parts.

    In parts: those of one part, and of the gradient of the head's weight, which is computed with the loss.
    """
    size, weight = tokens * vocabulary, 4.0 * vocabulary * hidden
    each = 2 * use.products if use.compiled else _LOSS  # compiled: the logit and its gradient
    if loss == "chunked":
        return each * min(size / _PARTS, _CHUNK_COMPILED if use.compiled else _CHUNK) + weight
    return each * size


def _token(model: Shape, use: Use) -> float:
    """Bytes of one layer for each token."""
    x, h = use.products, model.hidden
    # The output of a norm is kept as the input of what follows: cast for each product, if it is in 32 bits.
    copies = 2
    if use.autocast and not use.compiled and not (model.gated and use.residual == 2):
        copies = (1 if model.kind == "gpt2" else 3) + (2 if model.gated else 1)  # GPT-2 has q, k and v in one product
    masked = use.masked or 0 < model.window < use.length
    # Only without a mask do kernels take grouped heads as they are.
    attention = 2 * (model.width + (model.width if masked else model.shared)) * x
    if use.eager or model.kind == "gpt_neo":  # GPT-Neo has no other attention
        attention += model.heads * use.length * (4 + x if x < 4 else 4)
    elif masked:
        attention += use.length * x
    if model.kind in ("qwen3", "qwen3_moe"):  # norms of queries and keys
        attention += (model.width + model.shared) * (x if use.compiled else 4 + x)
    dropouts = 2 if model.dropout else 0
    return (2 * _norm(model, use) + copies * x + dropouts) * h + attention + model.inner * _between(model, use)


def _norm(model: Shape, use: Use) -> int:
    """Bytes of one norm for each number, without its output."""
    if use.compiled:
        return use.residual
    if model.gated:
        return 4 + use.residual  # RMSNorm: its input in 32 bits, and what its weights are multiplied with
    return 4 if use.autocast else use.residual


def _between(model: Shape, use: Use) -> int:
    """Bytes between the linear layers, for each number there."""
    x = use.products
    if model.gated:
        return 3 * x if use.compiled else 4 * x
    if model.activation == "relu":
        return x
    if model.activation in _WRITTEN_OUT and not use.compiled:
        return 16 if use.autocast else 5 * x
    return 2 * x
