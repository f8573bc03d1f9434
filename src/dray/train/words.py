"""The tokenizer: the model's own, or one token a byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NoReturn

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dray.train import chat, hub
from dray.train.config import Config
from dray.train.stop import stop

_TOGETHER = 1 << 12  # characters
END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"


def tokenizer(config: Config) -> PreTrainedTokenizerFast:
    """As the recipe says. It has a token that ends a document, and for a masked model one that hides."""
    said = config.model
    name = said.tokenizer or said.name
    if not name:
        return _of_bytes(masked=config.objective == "masked", chats=config.objective == "sft")
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
    # A tokenizer may have been saved with the lengths of somebody's batches.
    found.backend_tokenizer.no_truncation()
    found.backend_tokenizer.no_padding()
    if found.pad_token is None:
        found.pad_token = found.eos_token or found.sep_token
    if config.objective == "sft":
        chat.teach(found)
    return found


def ended(tokens: PreTrainedTokenizerFast) -> int:
    """The token that follows each document."""
    return int(tokens.sep_token_id if tokens.eos_token_id is None else tokens.eos_token_id)


def encoder(tokens: PreTrainedTokenizerFast, end: int) -> Callable[[list[str]], list[int]]:
    """Documents as one row of tokens, each with its end."""
    fast = tokens.backend_tokenizer
    mark = tokens.convert_ids_to_tokens(end) if _joins(fast, end) else None

    def encode(documents: list[str]) -> list[int]:
        row: list[int] = []
        if mark is not None:
            # Each call has a cost for each text; this halves the time where documents are lines.
            documents = ["".join(f"{text}{mark}" for text in some) for some in _groups(documents)]
        for encoding in fast.encode_batch_fast(documents):
            ids = encoding.ids
            row += ids
            if mark is None and ids[-1:] != [end]:
                row.append(end)
        return row

    return encode


def _joins(fast: Tokenizer, end: int) -> bool:
    """Whether texts with the end's own mark between them are the same tokens as one by one."""
    said = json.loads(fast.to_str())
    marks = [mark for mark in said["added_tokens"] if mark["id"] == end]
    plain = marks and not (marks[0]["lstrip"] or marks[0]["rstrip"] or marks[0]["single_word"])
    before = said["pre_tokenizer"] or {}
    parts = before.get("pretokenizers", [before])
    of_bytes = bool(before) and all(
        part["type"] == "Split" or (part["type"] == "ByteLevel" and not part["add_prefix_space"]) for part in parts
    )
    after = said["post_processor"] or {}
    adds = after.get("special_tokens") or after.get("type", "ByteLevel") not in ("ByteLevel", "TemplateProcessing")
    return bool(plain and of_bytes and said["normalizer"] is None and not adds)


def _groups(documents: list[str]) -> Iterator[list[str]]:
    """Some to be encoded together: enough that the call is cheap, and few enough that all cores have some."""
    some, size = [], 0
    for text in documents:
        some.append(text)
        size += len(text)
        if size > _TOGETHER:
            yield some
            some, size = [], 0
    if some:
        yield some


def _lacks(folder: str, wanted: str) -> NoReturn:
    stop("the tokenizer does not do", wanted=wanted, found=f"none in {folder}", fix="set model.tokenizer to another")


def _of_bytes(*, masked: bool, chats: bool) -> PreTrainedTokenizerFast:
    """One token a byte and one for the end of a text: nothing to download, nothing it cannot spell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = [END, MASK, PAD] if masked else [END]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *extra])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=END, pad_token=END, bos_token=END)
    if masked:
        found.mask_token, found.pad_token = MASK, PAD  # what pads has no embedding that learns
    if chats:
        chat.teach(found)
    return found
