"""Documents -> one row of tokens, each document with its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenizers import Encoding as Encoded
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dray.train.data.token_cache import LABEL, LAST

_GROUP = 1 << 12  # characters
Encode = Callable[[list[str]], list[int]]


class Encoding(NamedTuple):
    """A way to encode documents. All but PLAIN mark labels and document ends beside the tokens."""

    name: str
    encoder: Callable[[PreTrainedTokenizerFast, int], Encode]


def end_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that follows each document."""
    return int(tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id)


def _plain(tokenizer: PreTrainedTokenizerFast, end: int) -> Encode:
    fast = tokenizer.backend_tokenizer
    mark = tokenizer.convert_ids_to_tokens(end) if _can_be_joined(fast, end) else None

    def encode(documents: list[str]) -> list[int]:
        row: list[int] = []
        if mark is not None:
            # Each call has a cost for each text; this halves the time where documents are lines.
            documents = ["".join(f"{text}{mark}" for text in group) for group in _groups(documents)]
        for encoding in fast.encode_batch_fast(documents):
            ids = encoding.ids
            row += ids
            if mark is None and ids[-1:] != [end]:
                row.append(end)
        return row

    return encode


def _can_be_joined(fast: Tokenizer, end: int) -> bool:
    """Whether documents with the end's own text between them are the same tokens as one by one."""
    settings = json.loads(fast.to_str())
    marks = [mark for mark in settings["added_tokens"] if mark["id"] == end]
    plain = marks and not (marks[0]["lstrip"] or marks[0]["rstrip"] or marks[0]["single_word"])
    before = settings["pre_tokenizer"] or {}
    parts = before.get("pretokenizers", [before])
    of_bytes = bool(before) and all(
        part["type"] == "Split" or (part["type"] == "ByteLevel" and not part["add_prefix_space"]) for part in parts
    )
    after = settings["post_processor"] or {}
    adds = after.get("special_tokens") or after.get("type", "ByteLevel") not in ("ByteLevel", "TemplateProcessing")
    return bool(plain and of_bytes and settings["normalizer"] is None and not adds)


def _groups(documents: list[str]) -> Iterator[list[str]]:
    """Some to be encoded together: enough that the call is cheap, and few enough that all cores have some."""
    group, size = [], 0
    for text in documents:
        group.append(text)
        size += len(text)
        if size > _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _last_word(tokenizer: PreTrainedTokenizerFast, end: int) -> Encode:
    def encode(documents: list[str]) -> list[int]:
        row: list[int] = []
        texts = [text.rstrip() for text in documents]
        for text, tokens in zip(texts, tokenizer.backend_tokenizer.encode_batch(texts), strict=True):
            last = len(text) - len(text.split()[-1])
            row += labelled(tokens, [range(last, len(text))])
            row.append(end | LAST)
        return row

    return encode


def labelled(tokens: Encoded, spans: list[range]) -> list[int]:
    """The tokens of a text; those with a character of the spans have the mark LABEL."""
    return [
        token | (LABEL if any(begin < span.stop and after > span.start for span in spans) else 0)
        for token, (begin, after) in zip(tokens.ids, tokens.offsets, strict=True)
    ]


PLAIN, LAST_WORD = Encoding("all", _plain), Encoding("last word", _last_word)
