"""Documents -> one row of tokens, each document with its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Encoding as Encoded
from transformers import PreTrainedTokenizerFast

from dray.train.data.token_cache import LABEL, LAST

Encode = Callable[[list[str]], list[int]]


class Encoding(NamedTuple):
    """A way to encode documents. All but PLAIN mark labels and document ends beside the tokens."""

    name: str
    encoder: Callable[[PreTrainedTokenizerFast, int], Encode]


def end_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that follows each document."""
    return int(tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id)


def _plain(tokenizer: PreTrainedTokenizerFast, end: int) -> Encode:
    def encode(documents: list[str]) -> list[int]:
        row: list[int] = []
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(documents):
            ids = encoding.ids
            row += ids
            if ids[-1:] != [end]:
                row.append(end)
        return row

    return encode


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
