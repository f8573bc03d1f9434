"""The network, from a transformers configuration."""

from __future__ import annotations

import difflib

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from dray.train.config import Config
from dray.train.stop import stop


def build(config: Config, tokens: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A freshly initialised model; an unknown setting stops the run, since transformers would take it silently."""
    try:
        defaults = AutoConfig.for_model(config.model_type)
    except ValueError:
        stop(
            f"transformers knows no model type {config.model_type!r}",
            wanted="a causal model type, such as gpt2 or llama",
            found=f"model.type = {config.model_type!r}",
            fix="set model.type",
        )
    known = set(defaults.to_dict()) | set(defaults.attribute_map)
    for name in config.model_config:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            stop(
                f"a {config.model_type} configuration has no {name!r}",
                wanted=f"one of transformers' own names{', such as ' + ', '.join(near) if near else ''}",
                found=f"model.config.{name}",
                fix="correct model.config in the recipe",
            )
    settings = {
        "vocab_size": len(tokens),
        "bos_token_id": tokens.bos_token_id,
        "eos_token_id": tokens.eos_token_id,
        **config.model_config,
    }
    made = AutoConfig.for_model(config.model_type, **settings)
    positions = getattr(made, "max_position_embeddings", None)
    if positions is not None and positions < config.block:
        stop(
            "a block is longer than the model's positions",
            wanted=f"data.block of at most {positions}",
            found=f"data.block = {config.block}",
            fix="set a smaller data.block or more positions in model.config",
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made)
    return model
