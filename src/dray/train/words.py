"""The tokenizer: the model's own, or one token a byte."""

from __future__ import annotations

from typing import NoReturn

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dray.train import hub
from dray.train.config import Config
from dray.train.stop import stop

END, MASK = "<|endoftext|>", "<|mask|>"


def tokenizer(config: Config) -> PreTrainedTokenizerFast:
    """As the recipe says. It has a token that ends a document, and for a masked model one that hides."""
    said = config.model
    name = said.tokenizer or said.name
    if not name:
        return _of_bytes(masked=config.objective == "masked")
    folder = hub.model(name, said.revision if name == said.name else "main", weights=False, code=said.trust_remote_code)
    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=said.trust_remote_code)
    except (ValueError, OSError) as error:
        stop(
            "the tokenizer cannot be read",
            wanted=f"a tokenizer.json in {folder}",
            found=" ".join(str(error).split())[:300],
            fix="set model.tokenizer",
        )
    if not isinstance(found, PreTrainedTokenizerFast):
        _lacks(folder, "the fast kind, with a tokenizer.json")
    if found.eos_token_id is None and found.sep_token_id is None:
        _lacks(folder, "an end of text (eos or sep)")
    if config.objective == "masked" and found.mask_token_id is None:
        _lacks(folder, "a mask token")
    if found.pad_token is None:
        found.pad_token = found.eos_token or found.sep_token
    return found


def ended(tokens: PreTrainedTokenizerFast) -> int:
    """The token that follows each document."""
    return int(tokens.sep_token_id if tokens.eos_token_id is None else tokens.eos_token_id)


def _lacks(folder: str, wanted: str) -> NoReturn:
    stop("the tokenizer does not do", wanted=wanted, found=f"none in {folder}", fix="set model.tokenizer to another")


def _of_bytes(*, masked: bool) -> PreTrainedTokenizerFast:
    """One token a byte and one for the end of a text: nothing to download, nothing it cannot spell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = [END, MASK] if masked else [END]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *extra])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=END, pad_token=END, bos_token=END)
    if masked:
        found.mask_token = MASK
    return found
