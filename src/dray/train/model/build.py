"""The network: one that exists, or a new one from a transformers configuration.

Rank 0 alone has its weights; the others have room for them that no memory stands behind yet, and get them when the
strategy shards or copies the model. A node so holds one copy in its memory, not one for each of its ranks. Where a
checkpoint overwrites all weights, rank 0 has such room, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

from dray.contract.findings import ConfigError, nearest
from dray.train import errors, objectives, ranks
from dray.train.config import Config
from dray.train.data import hub
from dray.train.model import attention, head, lora

_CPU = torch.device("cpu")
_SMALL = 50_000_000
"""Weights of a small model."""


def build(
    config: Config, tokens: PreTrainedTokenizerFast, *, filled: bool, restored: bool = False,
    device: torch.device = _CPU, placed: dict[str, Any] | None = None,
) -> PreTrainedModel:  # fmt: skip
    """The model; with its weights if `filled`, unless a checkpoint will overwrite them all, as `restored` says.

    A new model is initialized on `device`. `placed` says where `from_pretrained` puts those of several devices.
    """
    attention.look_for_documents(config.data.document_mask)
    # No row is padded. transformers looks for that, only to warn, by reading the device in every pass.
    PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None
    model = config.model
    folder = ""
    if model.name:
        folder = hub.model(model.name, model.revision, weights=model.weights and filled, code=model.trust_remote_code)
    settings = _settings(config, folder, tokens)
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "dtype": _dtype(config, settings)}
    if model.attn_implementation != "auto":
        options["attn_implementation"] = model.attn_implementation
    auto_model = objectives.named(config.train.objective).auto_model
    wanted = f"{config.train.objective}, type {settings.model_type}, attention {model.attn_implementation}"
    fix = "correct [model] or train.objective"
    with errors.refusing("transformers cannot build the model", where=folder, wanted=wanted, fix=fix):
        with no_init_weights():
            network: PreTrainedModel = auto_model.from_config(settings, **options)
        if filled and not (restored and _restores_all(config, network)):
            if folder and model.weights:
                network = auto_model.from_pretrained(
                    folder, config=settings, use_safetensors=True, **options, **(placed or {})
                )
            else:
                network = _initialized(network, config, device, lambda: auto_model.from_config(settings, **options))
        elif folder and model.weights:
            _read_generation_config(network, folder)
        network.tie_weights()
    if config.analog:
        from dray.train.model import analog  # noqa: PLC0415  not every image has it

        analog.convert(network, config.analog, folder)
    if config.lora:
        torch.manual_seed(config.train.seed)
        lora.add(network, config.lora, task=objectives.named(config.train.objective).peft_task)
    if config.data.document_mask:
        _check_document_mask(config, network, filled=filled)
    if filled:
        with network.device:
            head.check(network, config.train.loss)
    if config.train.activation_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    return network


def _restores_all(config: Config, network: PreTrainedModel) -> bool:
    """Whether a checkpoint overwrites all weights, and none is needed before: the check of the document mask computes.

    Of frozen weights, such as LoRA's base, not every strategy saves a copy.
    """
    frozen = config.lora is not None or not all(weight.requires_grad for weight in network.parameters())
    return not frozen and not config.data.document_mask


def _initialized(
    empty: PreTrainedModel, config: Config, device: torch.device, make: Callable[[], PreTrainedModel]
) -> PreTrainedModel:
    """The model that `make` makes, on the device if it has room; `empty` is the same without weights, on the CPU."""
    # A base of LoRA is initialized at each start: on the CPU, where its weights do not depend on the GPU's memory.
    where = device if config.lora is None and _on_device(device, empty) else _CPU
    torch.manual_seed(config.train.seed)
    with where:
        network = make()
    if where.type != "cpu":  # a resumed run computes these on the CPU, and a GPU rounds in another way
        saved = network.state_dict()
        for name, buffer in network.named_buffers():
            if name not in saved:
                buffer.copy_(empty.get_buffer(name))
    return network


def _on_device(device: torch.device, network: PreTrainedModel) -> bool:
    """Whether a new model is initialized on the GPU: a large one that takes at most half of its memory.

    A small one is initialized on the CPU within a second, and has the same weights on all machines.
    """
    if device.type == "cpu" or sum(weight.numel() for weight in network.parameters()) < _SMALL:
        return False
    size = sum(weight.nbytes for weight in network.parameters())
    return bool(2 * size <= torch.cuda.get_device_properties(device).total_memory)


def _read_generation_config(network: PreTrainedModel, folder: str) -> None:
    if (Path(folder) / "generation_config.json").is_file():
        network.generation_config = GenerationConfig.from_pretrained(folder)


def check(config: Config, tokens: PreTrainedTokenizerFast) -> tuple[PreTrainedConfig, str]:
    """The model's checked configuration, and the folder that model.name names."""
    model = config.model
    folder = hub.model(model.name, model.revision, weights=False, code=model.trust_remote_code) if model.name else ""
    return _settings(config, folder, tokens), folder


def shell(config: Config, tokens: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model without its weights and without room for them."""
    settings, folder = check(config, tokens)
    auto_model = objectives.named(config.train.objective).auto_model
    wanted, fix = f"{config.train.objective}, type {settings.model_type}", "correct [model] or train.objective"
    with errors.refusing("transformers cannot build the model", where=folder, wanted=wanted, fix=fix):
        with torch.device("meta"):
            found: PreTrainedModel = auto_model.from_config(settings, trust_remote_code=config.model.trust_remote_code)
        if folder:
            _read_generation_config(found, folder)
    return found


def _check_document_mask(config: Config, network: PreTrainedModel, *, filled: bool) -> None:
    """Many models take position_ids and let attention cross documents all the same: so this one is tried."""
    problem, kind = "", network.config.model_type
    if not objectives.named(config.train.objective).predicts_next:
        problem = f"objective {config.train.objective}"
    elif "position_ids" not in inspect.signature(network.forward).parameters:
        problem = f"{kind}, which takes no position_ids"
    elif config.model.attn_implementation == "flash_attention_2":
        if config.per_device > 1:  # transformers looks for documents in a batch of one row alone
            problem = f"flash attention with batch.per_device = {config.per_device}"
    elif filled and not _masks_documents(network.eval()):
        problem = f"{kind}, whose attention crosses documents"
    network.train()
    if problem:
        raise ConfigError(
            "this model cannot mask documents",
            wanted="a causal model that separates documents by position_ids",
            found=problem,
            fix="remove data.document_mask, or use another model, another attention or batch.per_device = 1",
        )


@torch.no_grad()
def _masks_documents(network: PreTrainedModel) -> bool:
    """Whether the second of two documents in a row has the same logits, whatever the first is."""
    rows = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 3, 4, 5, 6]], device=network.device)
    places = torch.tensor([[0, 1, 0, 1, 2, 3]] * 2, device=network.device)
    logits = network(input_ids=rows, position_ids=places, use_cache=False).logits.float()
    return bool(torch.allclose(logits[0, 2:], logits[1, 2:], rtol=1e-3, atol=1e-4))


def _settings(config: Config, folder: str, tokens: PreTrainedTokenizerFast) -> PreTrainedConfig:
    model = config.model
    named = {"vocab_size": len(tokens), "bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id}
    named["pad_token_id"] = tokens.pad_token_id
    if folder:
        wanted = "a config.json that transformers can read"
        with errors.refusing(
            "transformers cannot read the model's config.json", where=folder, wanted=wanted, fix="set model.name"
        ):
            defaults = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    else:
        wanted = "a type that it knows, such as gpt2, llama or bert"
        with errors.refusing("transformers has no such model type", wanted=wanted, fix="set model.type"):
            defaults = AutoConfig.for_model(model.type)
    known = set(defaults.to_dict()) | set(defaults.attribute_map)
    for name in model.config:
        if name not in known:
            raise ConfigError(
                f"a {defaults.model_type} configuration has no {name!r}",
                wanted=nearest(name, known) or "a name that transformers knows",
                found=f"model.config.{name}",
                fix="correct model.config in the recipe",
            )
    wanted = f"values that a {defaults.model_type} configuration accepts"
    with errors.refusing("transformers refuses model.config", wanted=wanted, fix="correct model.config in the recipe"):
        made: PreTrainedConfig = defaults if folder else AutoConfig.for_model(model.type, **named | model.config)
        if folder:
            made.update(model.config)
    _check_sizes(config, made, tokens)
    return made


def _check_sizes(config: Config, made: PreTrainedConfig, tokens: PreTrainedTokenizerFast) -> None:
    made = made.get_text_config()
    positions = getattr(made, "max_position_embeddings", None)
    if positions is not None and positions < config.data.sequence_length:
        raise ConfigError(
            "a sample is longer than the model's max_position_embeddings",
            wanted=f"data.sequence_length of at most {positions}",
            found=f"data.sequence_length = {config.data.sequence_length}",
            fix="set a smaller data.sequence_length, or a larger max_position_embeddings in model.config",
        )
    last = max(tokens.get_vocab().values())  # a crafted tokenizer has greater ids than tokens
    if made.vocab_size <= last:
        raise ConfigError(
            "the tokenizer has tokens that the model lacks",
            wanted=f"ids below {made.vocab_size}, the model's vocab_size",
            found=f"ids up to {last} in the tokenizer",
            fix="set model.tokenizer to the one that belongs to the model",
        )


def _dtype(config: Config, settings: PreTrainedConfig) -> torch.dtype:
    if config.model.dtype == "auto":
        return getattr(torch, str(settings.dtype or torch.float32).removeprefix("torch."))  # type: ignore[no-any-return]
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.model.dtype]


def has_weights() -> bool:
    """Whether this rank reads or initializes the weights."""
    return ranks.rank() == 0
