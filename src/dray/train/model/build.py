"""The network: one that exists, or a new one from a transformers configuration.

Rank 0 alone has its weights. The other ranks allocate memory for them and never touch it, until the strategy shards or
copies the model to them. So a node holds one copy in its memory, not one for each of its ranks. If a checkpoint will
overwrite all weights, rank 0 does the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from dray.contract.findings import ConfigError, nearest
from dray.train import errors, objectives, ranks
from dray.train.config import Config
from dray.train.data import hub
from dray.train.model import attention, head, lora

_CPU = torch.device("cpu")
_SMALL = 50_000_000
"""Weights of a small model, which a CPU initializes within a second."""


def build(
    config: Config, tokens: PreTrainedTokenizerFast, *, with_weights: bool, resumes: bool = False,
    device: torch.device = _CPU, device_map: dict[str, Any] | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Return the model, with its weights if `with_weights`, and not if a checkpoint will overwrite them (`resumes`).

    A new model is initialized on `device`. `device_map` has options of `from_pretrained`, to use several devices.
    """
    attention.look_for_documents(config.data.document_mask)
    # No row is padded. transformers looks for that, only to warn, by reading the device in every pass.
    PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None
    model, objective = config.model, objectives.named(config.train.objective)
    settings, folder = check(config, tokens, weights=model.weights and with_weights)
    dtype = settings.dtype or torch.float32
    if model.dtype != "auto":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[model.dtype]
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "dtype": dtype}
    if model.attn_implementation != "auto":
        options["attn_implementation"] = model.attn_implementation
    with _refusing(config, folder):
        with no_init_weights():
            network: PreTrainedModel = objective.auto_model.from_config(settings, **options)
        # Not every strategy saves frozen weights, such as LoRA's base, and the check of the document mask computes.
        frozen = config.lora is not None or not all(weight.requires_grad for weight in network.parameters())
        if not with_weights or (resumes and not frozen and not config.data.document_mask):
            if model.weights:
                _read_generation_config(network, folder)
        elif folder and model.weights:
            network = objective.auto_model.from_pretrained(
                folder, config=settings, use_safetensors=True, **options, **(device_map or {})
            )
        else:
            network = _initialized(
                network, config, device, lambda: objective.auto_model.from_config(settings, **options)
            )
        network.tie_weights()
    if config.analog:
        from dray.train.model import analog  # noqa: PLC0415  not every image has it

        analog.convert(network, config.analog, folder)
    if config.lora:
        torch.manual_seed(config.train.seed)
        lora.add(network, config.lora, task="CAUSAL_LM" if objective.predicts_next else None)
    if with_weights:
        if config.data.document_mask:
            _check_document_mask(config, network)
        with network.device:
            head.check(network, config.train.loss)
    if config.train.activation_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    return network


def shell(config: Config, tokens: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model without its weights and without room for them."""
    settings, folder = check(config, tokens)
    auto_model = objectives.named(config.train.objective).auto_model
    with _refusing(config, folder), torch.device("meta"):
        network: PreTrainedModel = auto_model.from_config(settings, trust_remote_code=config.model.trust_remote_code)
        _read_generation_config(network, folder)
    return network


def check(config: Config, tokens: PreTrainedTokenizerFast, *, weights: bool = False) -> tuple[PreTrainedConfig, str]:
    """The model's checked configuration, and the folder that model.name names, with its weights if asked."""
    model, folder = config.model, ""
    if model.name:
        folder = hub.model(model.name, model.revision, weights=weights, code=model.trust_remote_code)
    with _refusing(config, folder):
        if folder:
            settings = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
            _check_names(model.config, settings)
            settings.update(model.config)
        else:
            _check_names(model.config, AutoConfig.for_model(model.type))
            sizes = {name: getattr(tokens, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
            settings = AutoConfig.for_model(model.type, **{"vocab_size": len(tokens), **sizes, **model.config})
    _check_sizes(config, settings.get_text_config(), tokens)
    return settings, folder


def _check_names(names: Iterable[str], settings: PreTrainedConfig) -> None:
    known = {*settings.to_dict(), *settings.attribute_map}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"a {settings.model_type} configuration has no {name!r}",
                wanted=nearest(name, known) or "a name that transformers knows",
                found=f"model.config.{name}",
                fix="correct model.config in the recipe",
            )


def _refusing(config: Config, folder: str) -> AbstractContextManager[None]:
    model = config.model
    return errors.refusing(
        "transformers cannot build the model",
        where=folder,
        wanted=f"{config.train.objective}, {model.name or model.type}, attention {model.attn_implementation}",
        fix="correct [model] or train.objective",
    )


def _read_generation_config(network: PreTrainedModel, folder: str) -> None:
    if folder and (Path(folder) / "generation_config.json").is_file():
        network.generation_config = GenerationConfig.from_pretrained(folder)


def _initialized(
    empty: PreTrainedModel, config: Config, device: torch.device, make: Callable[[], PreTrainedModel]
) -> PreTrainedModel:
    """Initialize the model that `make` makes; `empty` is the same model on the CPU, without weights.

    A large one is initialized on the GPU, if it takes at most half of its memory. A small one has the same weights on
    all machines, and so has LoRA's base, which is initialized at each start.
    """
    weights = [*empty.parameters()]
    if device.type != "cpu":
        room = torch.cuda.get_device_properties(device).total_memory / 2
        large = sum(weight.numel() for weight in weights) >= _SMALL
        if config.lora or not large or sum(weight.nbytes for weight in weights) > room:
            device = _CPU
    torch.manual_seed(config.train.seed)
    with device:
        network = make()
    if device.type != "cpu":  # a resumed run computes these on the CPU, and a GPU rounds in another way
        saved = network.state_dict()
        for name, buffer in network.named_buffers():
            if name not in saved:
                buffer.copy_(empty.get_buffer(name))
    return network


def _check_document_mask(config: Config, network: PreTrainedModel) -> None:
    """Many models take position_ids and let attention cross documents all the same: so this one is tried."""
    separates = objectives.named(config.train.objective).predicts_next
    if config.model.attn_implementation == "flash_attention_2":
        separates = separates and config.per_device == 1  # else transformers does not look for documents
    elif separates:
        separates = "position_ids" in inspect.signature(network.forward).parameters and _separates_documents(network)
    if not separates:
        raise ConfigError(
            "this model cannot mask documents",
            wanted="a causal model that separates documents by position_ids; with flash_attention_2 one row at a time",
            found=f"{config.train.objective} {network.config.model_type}, batch.per_device = {config.per_device}",
            fix="remove data.document_mask, or use another model, another attention or batch.per_device = 1",
        )


@torch.no_grad()
def _separates_documents(network: PreTrainedModel) -> bool:
    """Whether the second of two documents in a row has the same logits, whatever the first is."""
    rows = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 3, 4, 5, 6]], device=network.device)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]] * 2, device=network.device)
    logits = network.eval()(input_ids=rows, position_ids=positions, use_cache=False).logits[:, 2:].float()
    network.train()
    return bool(torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-4))


def _check_sizes(config: Config, settings: PreTrainedConfig, tokens: PreTrainedTokenizerFast) -> None:
    positions = getattr(settings, "max_position_embeddings", None) or config.data.sequence_length
    if positions < config.data.sequence_length:
        raise ConfigError(
            "a sample is longer than the model's max_position_embeddings",
            wanted=f"data.sequence_length of at most {positions}",
            found=f"data.sequence_length = {config.data.sequence_length}",
            fix="set a smaller data.sequence_length, or a larger max_position_embeddings in model.config",
        )
    last = max(tokens.get_vocab().values())  # a crafted tokenizer has greater ids than tokens
    if settings.vocab_size <= last:
        raise ConfigError(
            "the tokenizer has tokens that the model lacks",
            wanted=f"ids below {settings.vocab_size}, the model's vocab_size",
            found=f"ids up to {last} in the tokenizer",
            fix="set model.tokenizer to the one that belongs to the model",
        )


def has_weights() -> bool:
    """Whether this rank reads or initializes the weights."""
    return ranks.rank() == 0
