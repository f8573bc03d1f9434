"""Which attention a model computes, and with which mask.

transformers makes a mask in every compiled pass (5.23 with torch before 2.14), and reads the device in every other one
to see whether documents are packed. With a mask SDPA uses no flash kernel, computes the masked scores too, and copies
grouped heads. So the functions here have a mask function of their own, which makes none if `is_causal` is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import masking_utils
from transformers.integrations import sdpa_attention
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dray.train.config import Config
from dray.train.model.layers import heads

_SDPA, _FLEX = "dray-sdpa", "dray-flex"
_FUSED = (8, 0)  # the first compute capability with flash attention; Triton's matrix products begin there, too
_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_SMALLEST_HEAD = 16  # for flex attention


def look_for_documents(masked: bool) -> None:
    """Set for all models whether position ids that restart begin a new document."""
    masking_utils.find_packed_sequence_indices = _document_numbers if masked else lambda _: None


def _document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """The number of each token's document. transformers' own reads from the device whether there is more than one."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def install(network: Any, config: Config, device: torch.device) -> str:  # noqa: ANN401  a transformers model
    """Set the attention for this device; return the choice with its reason."""
    documents, usual = config.data.document_mask, network.config._attn_implementation
    if usual != "sdpa":
        return f"{usual}: set by model.attn_implementation, or the only one of this model"
    choice = "sdpa with a mask for documents" if documents else "sdpa without a mask where is_causal is enough"
    network.set_attn_implementation(_SDPA)
    if device.type == "cpu":
        return choice
    fused = torch.cuda.get_device_capability(device) >= _FUSED
    if documents and config.model.attn_implementation == "auto":
        if fused and _has_flex(network):
            network.set_attn_implementation(_FLEX)
            return "flex_attention: it skips what the mask for documents hides"
        choice += (
            ": flex_attention needs compute capability 8.0, a head size of 16, no dropout, and a model that has it"
        )
    if not fused or config.train.precision == "fp32":
        # Without flash attention only the unfused kernel knows grouped heads, and it keeps every score.
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    return choice


def _has_flex(network: Any) -> bool:  # noqa: ANN401  a transformers model
    settings = network.config.get_text_config()
    dropout = any(getattr(settings, name, 0.0) for name in _DROPOUTS)
    smallest = min(size for _, size in heads(settings))
    return network._supports_flex_attn and not dropout and smallest >= _SMALLEST_HEAD


def _mask(**options: Any) -> torch.Tensor | None:  # noqa: ANN401  what transformers passes
    """SDPA's; none where all of it is causal, or nothing is hidden. Decided by sizes alone, so that it is compiled."""
    skips = options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip", False)
    length, window = options["kv_length"], options.get("local_size")
    whole = options["q_length"] == length and (window is None or length <= window)
    if skips and whole and options.get("attention_mask") is None:
        return None
    return sdpa_mask(**options)  # type: ignore[no-any-return]


def _blocks(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: torch.device,
    **_: object,
) -> BlockMask:
    """Flex attention's; transformers' own breaks a compiled graph with torch 2.13."""
    make = create_block_mask if torch.compiler.is_compiling() else torch.compile(create_block_mask)
    return make(mask_function, batch_size, None, q_length, kv_length, device=device)


def register(name: str, function: Callable[..., Any], mask: Callable[..., Any] = _mask) -> None:
    """Make an attention function one of transformers', with a mask function of this module."""
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)


register(_SDPA, sdpa_attention.sdpa_attention_forward)
register(_FLEX, flex_attention_forward, _blocks)
