"""Text -> documents -> byte tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dray.train import corpus
from dray.train.config import Config
from dray.train.shards import Tokens, fingerprint, made
from dray.train.stop import stop

END = "<|endoftext|>"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte and one for the end of a text: nothing to download, nothing it cannot spell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, END])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=END, pad_token=END, bos_token=END)


def splits(config: Config, tokens: PreTrainedTokenizerFast, say: Callable[[str], None]) -> tuple[Tokens, Tokens]:
    """Training and validation documents; validation is the last ones, so that both are the same on every rank."""
    whole = made(
        Path(config.cache or f"/tmp/dray-tokens-{os.getuid()}"),  # noqa: S108  a node's own, and the user's alone
        fingerprint(*_identity(config), tokens.backend_tokenizer.to_str()),
        lambda: corpus.documents() if config.text == "builtin" else _lines(Path(config.text)),
        lambda texts: [encoding.ids for encoding in tokens.backend_tokenizer.encode_batch_fast(texts)],
        end=tokens.eos_token_id,
        vocabulary=len(tokens),
        say=say,
    )
    count = len(whole.starts) - 1
    kept = max(1, count * config.validation_percent // 100)
    training, validation = whole.part(0, max(0, count - kept)), whole.part(max(0, count - kept), count)
    for name, part in (("training", training), ("validation", validation)):
        if len(part.ids) < config.block:
            stop(
                f"the {name} text is too short",
                wanted=f"at least one sample of {config.block} tokens",
                found=f"{len(part.ids)} in {config.text}",
                fix="give more text, a smaller data.block, or another data.validation_percent",
            )
    return training, validation


def _identity(config: Config) -> tuple[object, ...]:
    if config.text == "builtin":
        return ("builtin",)
    try:
        seen = Path(config.text).stat()
    except OSError as error:
        _unreadable(config.text, error)
    return (Path(config.text).resolve(), seen.st_size, seen.st_mtime_ns)


def _unreadable(path: str | Path, error: OSError) -> NoReturn:
    stop("the text cannot be read", wanted=f"a text file at {path}", found=error.strerror, fix="check data.text")


def _lines(path: Path) -> Iterator[str]:
    """A document a line; empty lines are none."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                if line.strip():
                    yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        stop(
            "the text is not UTF-8",
            wanted="UTF-8",
            found=f"byte 0x{error.object[error.start]:02x} in {path}",
            fix=f"convert it: iconv -f LATIN1 -t UTF-8 '{path}'",
        )
    except OSError as error:
        _unreadable(path, error)
