"""The tokenizer: the model's own, or one token a byte."""

from __future__ import annotations

from typing import NoReturn

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dray.contract.findings import ConfigError
from dray.train import errors, objectives
from dray.train.config import Config
from dray.train.data import chat, hub

END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"


def load(config: Config) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer, with all that the objective needs: an end of text, a mask token, a chat template."""
    model, objective = config.model, objectives.named(config.train.objective)
    name, code = model.tokenizer or model.name, model.trust_remote_code
    if not name:
        return _of_bytes(mask=objective.needs_mask_token, conversations=objective.conversations)
    folder = hub.model(
        name, model.revision if name == model.name else model.tokenizer_revision, weights=False, code=code
    )
    wanted = "a tokenizer.json"
    with errors.refusing("the tokenizer cannot be read", where=folder, wanted=wanted, fix="set model.tokenizer"):
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=code)
    if not isinstance(found, PreTrainedTokenizerFast):
        _lacks(folder, "a fast tokenizer, with a tokenizer.json")
    if found.eos_token_id is None and found.sep_token_id is None:
        _lacks(folder, "an end-of-text token (eos or sep)")
    if objective.needs_mask_token and found.mask_token_id is None:
        _lacks(folder, "a mask token")
    # A tokenizer may have been saved with the lengths of somebody's batches.
    found.backend_tokenizer.no_truncation()
    found.backend_tokenizer.no_padding()
    if found.pad_token is None:
        found.pad_token = found.eos_token or found.sep_token
    if objective.conversations:
        chat.ensure_template(found)
    return found


def _lacks(folder: str, wanted: str) -> NoReturn:
    raise ConfigError(
        "the tokenizer lacks what this run needs",
        wanted=wanted,
        found=f"none in {folder}",
        fix="set another model.tokenizer",
    )


def _of_bytes(*, mask: bool, conversations: bool) -> PreTrainedTokenizerFast:
    """One token a byte and one for the end of a text: nothing to download, nothing it cannot spell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = [END, MASK, PAD] if mask else [END]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *extra])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=END, pad_token=END, bos_token=END)
    if mask:
        found.mask_token, found.pad_token = MASK, PAD  # what pads has no embedding that learns
    if conversations:
        chat.ensure_template(found)
    return found
