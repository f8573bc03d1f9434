"""[data] of a recipe: the datasets, and how they become samples."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dray.config.model import Spec


class Data(Spec):
    """What is trained on."""

    train: str = "builtin"
    """The dataset to train on: `builtin` (a small made-up language, the same bytes every time); a file, a folder or a
    pattern of txt, json, jsonl, csv, tsv, parquet or arrow, a document a line or row; or
    `hub:OWNER/NAME[/SUBSET][:SPLIT[+SPLIT]]`. A relative path starts at the recipe's own folder."""
    validation: str = ""
    """The dataset to evaluate, named likewise. Left out: the last documents of `train`."""
    test: str = ""
    """The dataset to evaluate once, after training."""
    validation_split_percentage: Annotated[int, Field(ge=1, le=50)] = 5
    """Percentage of the documents of `train` kept for evaluation where `validation` is left out."""
    column: str = "text"
    """Which column or key holds a document, where there are several; with train.objective = "sft" a conversation, a
    list of messages with role and content."""
    answer_column: str = ""
    """With train.objective = "sft": the column of the answers, where `column` is that of the questions."""
    min_characters: Annotated[int, Field(ge=0)] = 0
    """Shorter documents are left out; a conversation counts with the names of its roles."""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Tokens in one sample. Documents are joined and cut into samples of this length; no token is dropped."""
    document_mask: bool = False
    """Whether attention stays within each document, where a sample holds several."""
    max_train_samples: Annotated[int, Field(ge=0)] = 0
    """Train on at most this many samples; 0 is all."""
    max_eval_samples: Annotated[int, Field(ge=0)] = 0
    """Evaluate and test on at most this many samples; 0 is all."""
    streaming: bool = False
    """Tokenize while training, and keep no tokens on the disk: for datasets larger than a node's disk."""
    cache_dir: str = ""
    """Where a node keeps tokenized datasets, made once; else a folder in /tmp."""
