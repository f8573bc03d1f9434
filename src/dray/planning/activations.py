"""Estimates the activations kept for the backward pass, from a model's configuration alone: it needs no torch.

Calibrated against `dray.train.activations`, which counts them in the model itself; tests compare the two.
Numbers are bytes. Under autocast norms stay in 32 bits, and every product makes itself a copy in 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dray.contract.findings import ConfigError

# Where a configuration does not say: the function between a block's two linear layers, and its dropout.
_ACTIVATIONS = {"gpt2": "gelu_new", "gpt_neo": "gelu_new", "opt": "relu", "bert": "gelu"}
_DROPOUTS = {"gpt2": 0.1, "opt": 0.1, "bert": 0.1}
WITHOUT_FLEX = ("gpt2",)
"""Models for which transformers has no flex attention: on GPUs too they need a mask for documents."""
_WRITTEN_OUT = ("gelu_new", "gelu_fast")  # in single operations, of which each keeps something
_LOSS = 12
"""Bytes of a logit in eager mode: its logarithm and two gradients, in 32 bits."""

_HUGE = 1 << 62  # the product of some still fits into a float
_PARTS, _CHUNK, _CHUNK_COMPILED = 8, 1 << 27, 1 << 28
"""The fewest parts of chunked logits, and the most numbers of one part: train/kernels/chunked.py has them."""
_SLICE = 1 << 27
"""Numbers of the logits' gradient that train/kernels/triton.py holds."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The sizes that decide how much one layer of a model keeps."""

    hidden: int
    width: int
    """The width of all query heads together."""
    shared: int
    """The width of all key heads together, and of all value heads; several query heads may share one."""
    heads: int
    inner: int
    """The width between the linear layers; with experts, of all those that a token passes."""
    activation: str
    gated: bool
    """Whether it has a third linear layer, and norms without a mean."""
    fused: bool
    """Whether one product makes queries, keys and values."""
    normed: bool
    """Whether queries and keys have norms of their own."""
    dropout: bool
    eager: bool
    """Whether the scores are kept: the model has no other attention."""
    flex: bool
    """Whether transformers has flex attention for it."""
    window: int
    """How far attention reaches back; 0: to the beginning."""
    head: int
    """How many numbers for each hidden one are kept before the logits."""


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


def block(raw: Mapping[str, Any], *, hidden: int, width: int, shared: int, heads: int, inner: int) -> Block:
    """A model's layer, from config.json and the sizes that are read from it."""
    kind = str(raw.get("model_type", ""))
    names = ("activation_function", "hidden_act", "hidden_activation")
    gated = "rms_norm_eps" in raw
    activation = next((str(raw[name]) for name in names if raw.get(name)), _ACTIVATIONS.get(kind, "silu"))
    dropouts = [raw[name] for name in ("resid_pdrop", "resid_dropout", "hidden_dropout_prob", "dropout") if name in raw]
    windowed = raw.get("use_sliding_window", True)
    active = whole(raw, "num_experts_per_tok") or 1
    return Block(
        hidden=hidden, width=width, shared=shared, heads=heads, inner=inner * active, activation=activation,
        gated=gated, fused=kind == "gpt2", normed=kind in ("qwen3", "qwen3_moe"), eager=kind == "gpt_neo",
        flex=kind not in WITHOUT_FLEX,
        dropout=bool(dropouts[0] if dropouts else _DROPOUTS.get(kind, 0)),
        window=whole(raw, "sliding_window") if windowed else 0, head=9 if kind == "bert" else 0,
    )  # fmt: skip


def whole(raw: Mapping[str, Any], name: str) -> int:
    """A setting that is a whole number, or the largest of a list for the layers; 0 if it is missing."""
    value = 0 if raw.get(name) is None else raw[name]
    numbers: list[Any] = value if isinstance(value, list) and value else [value]
    if all(type(number) is int and abs(number) < _HUGE for number in numbers):
        return int(max(numbers))
    problem, found = "a size in the model's configuration is not a whole number", f"{name} = {value!r}"[:100]
    raise ConfigError(problem, where=name, wanted="a whole number, such as 12", found=found)


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
    if loss == "triton":
        return min(size, _SLICE) * use.products + 4.0 * vocabulary * hidden
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
