"""The tokenizer: the model's own, or one token a byte."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dray.contract.findings import ConfigError
from dray.train import errors, objectives
from dray.train.config import Config
from dray.train.data import encoding, hub

END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"


def load(config: Config) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer, with all that the objective needs: an end of text, a mask token, a chat template."""
    objective = objectives.named(config.train.objective)
    if config.model.tokenizer or config.model.name:
        tokenizer = _of_model(config, mask=objective.needs_mask_token)
    else:
        tokenizer = of_bytes(mask=objective.needs_mask_token)
    if objective.conversations:
        encoding.ensure_chat_template(tokenizer)
    return tokenizer


def _of_model(config: Config, *, mask: bool) -> PreTrainedTokenizerFast:
    model = config.model
    name, code = model.tokenizer or model.name, model.trust_remote_code
    revision = model.revision if name == model.name else model.tokenizer_revision
    folder = hub.model(name, revision, weights=False, code=code)
    fix = "set another model.tokenizer"
    with errors.refusing("the tokenizer cannot be read", where=folder, wanted="a tokenizer.json", fix=fix):
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder, trust_remote_code=code)
    needs = {
        "a fast tokenizer, with a tokenizer.json": tokenizer.is_fast,
        "an end-of-text token (eos or sep)": tokenizer.eos_token or tokenizer.sep_token,
        "a mask token": tokenizer.mask_token or not mask,
    }
    for wanted, has in needs.items():
        if not has:
            raise ConfigError("the tokenizer lacks what this run needs", where=folder, wanted=wanted, fix=fix)
    # A tokenizer may have been saved with the lengths of somebody's batches.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token
    return tokenizer


def of_bytes(*, mask: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte and one for the end of a text: nothing to download, nothing it cannot spell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, END, *([MASK, PAD] if mask else [])])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=END, pad_token=END, bos_token=END)
    if mask:
        tokenizer.mask_token, tokenizer.pad_token = MASK, PAD  # a padding token is never trained
    return tokenizer
