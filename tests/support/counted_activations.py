"""A model's parameters, and what its forward pass keeps for the backward pass: the formula is compared with it.

The model is built on the meta device, where tensors have shapes and no memory, and its forward pass runs under hooks
that see each tensor which is kept. CUDA's rules of autocast, its dropout and its flash attention are emulated, since
they decide it. As a program, the argument is the question as JSON (`Question`); the answer is JSON on standard output.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from dray.train.model import lora
from dray.train.recipe_schema import Lora

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# torch/csrc and aten/src/ATen/autocast_mode.h: what CUDA's autocast computes in 16 bits, in 32 and in the widest type.
_LOWER = {
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "multi_dot", "matmul", "__matmul__", "mm",
    "mv", "linear", "bilinear", "prelu", "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "scaled_dot_product_attention",
}  # fmt: skip
_FLOAT = {
    "__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "pow", "acos", "asin", "cosh", "tan", "sinh", "exp", "expm1",
    "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "cumprod", "cumsum", "prod", "sum", "norm", "renorm",
    "dist", "layer_norm", "group_norm", "normalize", "softmax", "log_softmax", "softmin", "softplus", "cross_entropy",
    "nll_loss", "cosine_similarity",
}  # fmt: skip


class Cuda(TorchFunctionMode):
    """CUDA's autocast to a type of 16 bits, if there is one, and its dropout, which keeps a byte for each number."""

    def __init__(self, half: torch.dtype | None, *, documents: bool) -> None:
        super().__init__()
        self.half, self.documents = half, documents
        self.weights: dict[int, torch.Tensor] = {}
        """The copies in 16 bits, of which autocast makes one of each weight."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__bool__":  # transformers asks whether a row is one document; no number is there to be looked at
            return not self.documents
        if name == "dropout" and kwargs.get("training", True) and kwargs.get("p", 0.5):
            return torch.native_dropout(args[0], kwargs.get("p", 0.5), True)[0]
        if self.half and name in _LOWER:
            args, kwargs = tree_map(self._lower, (args, kwargs))
        elif self.half and name in _FLOAT and args and isinstance(args[0], torch.Tensor):
            args, kwargs = tree_map(self._float, (args, kwargs))
        if name == "scaled_dot_product_attention":
            return _flash(*args, **kwargs)
        return func(*args, **kwargs)

    def _lower(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not value.is_leaf or not value.requires_grad:
            return value.to(self.half)
        return self.weights.setdefault(id(value), value.to(self.half))

    def _float(self, value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype == self.half else value


class _Flash(torch.autograd.Function):
    """Attention that keeps what flash attention does: its inputs, its output and a number for each row of scores; with
    a mask what the memory-efficient one does, which makes numbers of it to be added."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        rows, heads, length, _ = query.shape
        output: torch.Tensor = query.new_empty(rows, length, heads, value.shape[3]).transpose(1, 2)
        sums = query.new_empty(rows, heads, length, dtype=torch.float32)
        bias = [] if mask is None else [mask.to(query.dtype) if mask.dtype == torch.bool else mask]
        ctx.save_for_backward(query, key, value, output, sums, *bias)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise NotImplementedError("nothing is computed on the meta device")


def _flash(query: Any, key: Any, value: Any, attn_mask: Any = None, *_others: Any, **_options: Any) -> Any:
    return _Flash.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which model, and how it runs."""

    configuration: dict[str, Any]
    """Its config.json."""
    masked: bool = False
    """Whether it is trained as a masked language model."""
    length: int
    """Tokens of a row."""
    autocast: str = ""
    """The type that autocast computes in; empty without it."""
    weights: str = "fp32"
    """The type of the weights that compute."""
    attention: str = "auto"
    documents: bool = False
    """Whether a mask keeps documents of one row apart."""
    lora: dict[str, Any] | None = None
    """The recipe's [lora], where it is on."""


def main(question: Question) -> dict[str, int]:
    """Bytes that a row keeps, as it is and with activation checkpointing, whose backward pass has one layer's more; and
    the model's parameters."""
    settings = AutoConfig.for_model(**question.configuration)
    options = {} if question.attention != "eager" else {"attn_implementation": "eager"}
    with torch.device("meta"):
        network = (AutoModelForMaskedLM if question.masked else AutoModelForCausalLM).from_config(settings, **options)
    network.tie_weights()
    network.to(_TYPES[question.weights])
    kept = count(network, length=question.length, autocast=question.autocast, documents=question.documents)
    network.gradient_checkpointing_enable({"use_reentrant": False})
    between = count(network, length=question.length, autocast=question.autocast, documents=question.documents)
    layer = (kept - between) // settings.get_text_config().num_hidden_layers
    return {"kept": kept, "checkpointed": between + layer, **parameters(network, question)}


def parameters(network: PreTrainedModel, question: Question) -> dict[str, int]:
    """How many numbers its weights have, and how many of them are in no layer; with LoRA how many are trained."""
    sizes = {name: weight.numel() for name, weight in network.named_parameters()}  # one that is tied is named once
    layers = re.compile(r"\D*\.\d+\.")  # as in transformer.h.0.
    total, outside = sum(sizes.values()), sum(size for name, size in sizes.items() if not layers.match(name))
    trained = total
    if question.lora:
        lora.add(network, Lora(**question.lora))
        trained = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
    return {"parameters": total, "outside": outside, "trained": trained}


def count(network: PreTrainedModel, *, length: int, autocast: str, documents: bool = False) -> int:
    """Bytes that the forward pass of a row keeps, without weights and without what the loss makes of logits."""
    network.train()
    mode = Cuda(_TYPES[autocast] if autocast else None, documents=documents)
    kept: dict[int, tuple[int, torch.Tensor]] = {}
    own = {weight.untyped_storage()._cdata for weight in (*network.parameters(), *network.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (storage.nbytes(), tensor)  # the tensor, too: no other may get its number
        return tensor

    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    options: dict[str, Any] = {"use_cache": False} if hasattr(network, "generate") else {}
    if documents:
        options["position_ids"] = tokens
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mode:
        network(input_ids=tokens, **options)
    own |= {weight.untyped_storage()._cdata for weight in mode.weights.values()}
    return sum(size for storage, (size, _) in kept.items() if storage not in own)


if __name__ == "__main__":
    print(json.dumps(main(Question(**json.loads(sys.argv[1])))))
