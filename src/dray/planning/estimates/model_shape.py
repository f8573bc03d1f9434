"""The sizes of a model that decide its memory, from its config.json alone: it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dray.contract.findings import ConfigError
from dray.facts import Counted, Files

# What transformers takes where a configuration does not say.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    "gpt_neo": {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50257},
    "opt": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
            "vocab_size": 50272},
    "bert": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512,
             "intermediate_size": 3072, "vocab_size": 30522},
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
              "vocab_size": 32000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}  # fmt: skip
_LEARNED = {"gpt2": 1024, "gpt_neo": 2048, "opt": 2048, "bert": 512}  # positions that are weights
# Where a configuration does not say: the function between a block's two linear layers, and its dropout.
_ACTIVATIONS = {"gpt2": "gelu_new", "gpt_neo": "gelu_new", "opt": "relu", "bert": "gelu"}
_DROPOUTS = {"gpt2": 0.1, "opt": 0.1, "bert": 0.1}
WITHOUT_FLEX = ("gpt2",)
"""Models for which transformers has no flex attention: on GPUs too they need a mask for documents."""
_HUGE = 1 << 62  # the product of some still fits into a float


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
class Shape:
    """The sizes of a model, from its configuration."""

    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    linear: int
    """Inputs plus outputs of all linear layers of one block: LoRA's size grows with it."""
    outside: int
    """Parameters that are in no block, such as the embedding: FSDP gathers them once, as one group."""
    block: Block
    counted: Counted | None = None
    """What was counted in the model itself, if it was."""


def of(raw: Mapping[str, Any]) -> Shape | None:
    """The sizes from config.json; None if the type of the model is not known. ConfigError: a size is not a number."""
    raw = of_text(raw)
    kind = str(raw.get("model_type", ""))
    known = {**_DEFAULTS.get(kind, {}), **{key: value for key, value in raw.items() if value is not None}}

    def size(*names: str, other: int = 0) -> int:
        return next((whole(known, name) for name in names if name in known), other)

    hidden, layers = size("hidden_size", "n_embd", "d_model"), size("num_hidden_layers", "n_layer", "num_layers")
    heads, vocabulary = size("num_attention_heads", "n_head", "num_heads"), size("vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    each = size("head_dim", other=hidden // heads)
    width, shared = heads * each, size("num_key_value_heads", other=heads) * each
    experts = max(1, size("num_local_experts", "num_experts", "n_routed_experts"))
    expert_names = ("moe_intermediate_size",) if experts > 1 else ()
    opt_names = ("ffn_dim",) if kind == "opt" else ()
    inner = size(*expert_names, *opt_names, "intermediate_size", "n_inner", "ffn_dim", other=4 * hidden)
    gated = "rms_norm_eps" in known
    block = 2 * hidden * (width + shared) + (3 if gated else 2) * hidden * inner * experts
    block += 2 * hidden if gated else 4 * hidden + (hidden if kind == "gpt_neo" else 4 * hidden) + inner + hidden
    # Biases of queries, keys and values; and a norm for each of a head's queries and keys.
    block += {"qwen2": width + 2 * shared, "qwen3": 2 * each}.get(kind, 0)
    positions = size("max_position_embeddings", "n_positions", other=_LEARNED.get(kind, 0)) if kind in _LEARNED else 0
    positions += 2 if kind == "opt" else 0  # its first two are for padding
    tables = 1 if known.get("tie_word_embeddings", not gated) else 2
    total = vocabulary * hidden * tables + positions * hidden + layers * block
    total += hidden if gated else 2 * hidden
    if kind == "bert":  # types of tokens, and the head's layer and norm; the other norm is the embeddings'
        total += size("type_vocab_size", other=2) * hidden + hidden * hidden + 3 * hidden + vocabulary * tables
    linear = 4 * hidden + 2 * (width + shared) + (3 if gated else 2) * (hidden + inner)
    linear -= 2 * hidden if kind == "gpt2" else 0  # queries, keys and values are one layer
    sizes = _block(known, hidden=hidden, width=width, shared=shared, heads=heads, inner=inner)
    return Shape(total, hidden, layers, vocabulary, linear, total - layers * block, sizes)


def of_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that is about text, for a model that also sees or hears."""
    text = raw.get("text_config")
    return {**raw, **text} if isinstance(text, dict) else raw


def known(files: Files) -> Shape | None:
    """The sizes of the model, with what was counted in the model itself."""
    model = of(files.configuration) if files.configuration else None
    if model and (counted := files.counted):
        return replace(model, counted=counted, parameters=counted.parameters, outside=counted.outside)
    return model


def trained(model: Shape) -> float:
    """How many parameters of the model are trained."""
    return model.counted.trained if model.counted else model.parameters


def _block(raw: Mapping[str, Any], *, hidden: int, width: int, shared: int, heads: int, inner: int) -> Block:
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
    problem, shown = "a size in the model's configuration is not a whole number", f"{name} = {value!r}"[:100]
    raise ConfigError(problem, where=name, wanted="a whole number, such as 12", found=shown)
