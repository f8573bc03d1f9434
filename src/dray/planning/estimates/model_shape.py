"""The sizes of a model that decide its memory, from its config.json alone: it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dray.contract.findings import ConfigError
from dray.facts import Files

# What transformers takes where a configuration does not say.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
             "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neo": {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50257,
                "max_position_embeddings": 2048, "activation_function": "gelu_new"},
    "opt": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
            "vocab_size": 50272, "max_position_embeddings": 2048, "activation_function": "relu", "dropout": 0.1},
    "bert": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512,
             "intermediate_size": 3072, "vocab_size": 30522, "type_vocab_size": 2, "hidden_act": "gelu",
             "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
              "vocab_size": 32000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}  # fmt: skip
_LEARNED = ("gpt2", "gpt_neo", "opt", "bert")  # positions are weights
_ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")
_DROPOUTS = ("resid_pdrop", "resid_dropout", "hidden_dropout_prob", "dropout")
WITHOUT_FLEX = ("gpt2",)
"""Models for which transformers has no flex attention: on GPUs too they need a mask for documents."""
_HUGE = 1 << 62  # the product of some still fits into a float


class Shape(NamedTuple):
    """The sizes of a model, from its configuration."""

    kind: str
    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    outside: int
    """Parameters that are in no block, such as the embedding: FSDP gathers them once, as one group."""
    linear: int
    """Inputs plus outputs of all linear layers of one block: LoRA's size grows with it."""
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
    dropout: bool
    window: int
    """How far attention reaches back; 0: to the beginning."""


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The part of config.json that is about text, with the values that it leaves open, as far as they are known."""
    text = raw.get("text_config")
    raw = {**raw, **text} if isinstance(text, dict) else raw
    known = _DEFAULTS.get(str(raw.get("model_type")), {})
    return {**known, **{key: value for key, value in raw.items() if value is not None}}


def of(raw: Mapping[str, Any]) -> Shape | None:
    """The sizes from config.json; None if the type of the model is not known. ConfigError: a size is not a number."""
    known = completed(raw)
    kind, gated = str(known.get("model_type")), "rms_norm_eps" in known

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
    inner = size(*expert_names, "ffn_dim", "intermediate_size", "n_inner", other=4 * hidden)
    matrices = 3 if gated else 2
    block = 2 * hidden * (width + shared) + matrices * hidden * inner * experts
    block += 2 * hidden if gated else 4 * hidden + (hidden if kind == "gpt_neo" else 4 * hidden) + inner + hidden
    # Biases of queries, keys and values; and a norm for each of a head's queries and keys.
    block += {"qwen2": width + 2 * shared, "qwen3": 2 * each}.get(kind, 0)
    tables = 1 if known.get("tie_word_embeddings", not gated) else 2
    outside = vocabulary * hidden * tables + (hidden if gated else 2 * hidden)
    if kind in _LEARNED:
        padding = 2 if kind == "opt" else 0
        outside += (size("max_position_embeddings", "n_positions") + padding) * hidden
    if kind == "bert":  # types of tokens, and the head's layer and norm; the other norm is the embeddings'
        outside += size("type_vocab_size") * hidden + hidden * hidden + 3 * hidden + vocabulary * tables
    linear = 4 * hidden + 2 * (width + shared) + matrices * (hidden + inner)
    linear -= 2 * hidden if kind == "gpt2" else 0  # queries, keys and values are one layer
    return Shape(
        kind=kind, parameters=outside + layers * block, hidden=hidden, layers=layers, vocabulary=vocabulary,
        outside=outside, linear=linear, width=width, shared=shared, heads=heads, gated=gated,
        inner=inner * (size("num_experts_per_tok") or 1),
        activation=next((str(known[name]) for name in _ACTIVATIONS if name in known), "silu"),
        dropout=next((bool(known[name]) for name in _DROPOUTS if name in known), False),
        window=size("sliding_window") if known.get("use_sliding_window", True) else 0,
    )  # fmt: skip


def known(files: Files) -> Shape | None:
    """The sizes of the model."""
    return of(files.configuration or {})


def whole(raw: Mapping[str, Any], name: str) -> int:
    """A setting that is a whole number, or the largest of a list for the layers."""
    numbers: list[Any] = raw[name] if isinstance(raw[name], list) else [raw[name]]
    if numbers and all(type(number) is int and abs(number) < _HUGE for number in numbers):
        return int(max(numbers))
    problem, shown = "a size in the model's configuration is not a whole number", f"{name} = {raw[name]!r}"[:100]
    raise ConfigError(
        problem,
        where=f"model.config.{name} of the recipe, or {name} in the model's config.json",
        wanted="a whole number, such as 12",
        found=shown,
        fix=f"set model.config.{name} in the recipe",
    )
