"""Text -> documents -> byte tokens -> blocks."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from dray.train import corpus
from dray.train.config import Config
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


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Tokens cut into samples of one length, in a whole number of batches; what is left at the very end stays out."""

    def __init__(self, tokens: torch.Tensor, block: int, batch: int) -> None:
        unit = block * batch
        self.rows = tokens[: len(tokens) // unit * unit].view(-1, block)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row}


def splits(config: Config, tokens: PreTrainedTokenizerFast) -> tuple[Blocks, Blocks]:
    """Training and validation blocks; validation is the last documents, so that both are the same on every rank."""
    texts = list(corpus.documents()) if config.text == "builtin" else _lines(Path(config.text))
    kept = max(1, len(texts) * config.validation_percent // 100)
    parts = []
    # A last step on fewer samples than the rest would be a step of another size.
    for name, part, batch in (("training", texts[:-kept], config.global_size), ("validation", texts[-kept:], 1)):
        ids = [token for text in part for token in [*tokens(text)["input_ids"], tokens.eos_token_id]]
        blocks = Blocks(torch.tensor(ids, dtype=torch.long), config.block, batch)
        if len(blocks) == 0:
            stop(
                f"the {name} text is too short",
                wanted=f"at least {config.block * batch} bytes: {batch} samples of {config.block}",
                found=f"{len(ids)} in {config.text}",
                fix="give more text, a smaller data.block or batch.global_size, or another data.validation_percent",
            )
        parts.append(blocks)
    return parts[0], parts[1]


def _lines(path: Path) -> list[str]:
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        stop("the text cannot be read", wanted=f"a text file at {path}", found=error.strerror, fix="check data.text")
    except UnicodeDecodeError as error:
        stop(
            "the text is not UTF-8",
            wanted="UTF-8",
            found=f"byte 0x{error.object[error.start]:02x} at offset {error.start} of {path}",
            fix=f"convert it: iconv -f LATIN1 -t UTF-8 '{path}'",
        )
    return texts
