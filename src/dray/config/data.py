"""[data] of a recipe: the datasets, and how they become samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from dray.config.load_toml import Natural, Spec
from dray.contract import secrets
from dray.contract.findings import ConfigError, listed, nearest
from dray.contract.trainer import dataset

# What decides where bytes come from and go, who asks for them, or whether a dataset's own code runs.
_TAKEN = {
    "path", "name", "split", "streaming", "data_files", "data_dir", "cache_dir", "con", "revision", "token",
    "trust_remote_code", "storage_options", "download_config", "download_mode", "num_proc", "keep_in_memory",
}  # fmt: skip
_MAP = re.compile(r"[^\0]+\.py:[^\W\d]\w*")


def _names_a_function(named: str) -> str:
    if named and not _MAP.fullmatch(named.partition("\n")[0]):
        raise ValueError("expected FILE.py:FUNCTION, such as prep.py:clean")
    return named


Map = Annotated[str, AfterValidator(_names_a_function)]


class Source(Spec):
    """One dataset of a mix."""

    dataset: str
    """The dataset, written as in data.train. Its last documents are for evaluation."""
    column: str = ""
    """The column with the documents. Left out: data.column."""
    map: Map = ""
    """A function on its rows, written as in data.map. Left out: data.map."""
    weight: Annotated[float, Field(gt=0, le=1e15)] = 1.0
    """Its share of the samples, relative to the other sources: 3 and 1 give three samples of four."""


class Data(Spec):
    """The datasets, and how they become samples."""

    train: str = "builtin"
    """The dataset to train on: `builtin` (a small made-up language, the same bytes every time); a file, a folder or a
    pattern of txt, json, jsonl, csv, tsv, parquet or arrow, one document per line or row, on a disk or by URL (s3://, hf://,
    https://); `BUILDER:FILES` for what another builder of `datasets` reads, such as webdataset; or
    `hub:OWNER/NAME[/SUBSET][:SPLIT[+SPLIT]]`. `:train[:1%]` behind files takes a part of their rows. A relative path
    starts at the recipe's own folder."""
    mix: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")], Source] = {}
    """Several datasets to train on, by weight, instead of `train`. Metrics use the names given here."""
    validation: str = ""
    """The dataset to evaluate, as in `train`. Left out: the last documents of `train`, or of each source of `mix`."""
    test: str = ""
    """The dataset to evaluate once, after training."""
    validation_split_percentage: Annotated[int, Field(ge=1, le=50)] = 5
    """Percentage of the documents of `train` kept for evaluation if `validation` is left out; of each source of
    `mix` in any case."""
    column: str = "text"
    """The column or key with the documents, if there are several; with train.objective = "sft" with conversations: a
    list of messages with role and content."""
    answer_column: str = ""
    """With train.objective = "sft": the column with the answers; `column` then has the questions."""
    map: Map = ""
    """FILE.py:FUNCTION: your function, which gets each row as a dict before `column` is read, and returns a dict, a
    list of dicts, or None to drop the row. The plan has the file's text. A relative path starts beside the recipe."""
    config_kwargs: dict[Literal[*dataset.BUILDERS], dict[str, Any]] = {}  # type: ignore[valid-type]
    """More arguments of load_dataset, by builder of `datasets`, such as sep for csv."""
    min_characters: Natural = 0
    """Shorter documents are left out. The length of a conversation includes the names of its roles."""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Tokens in one sample."""
    packing: Literal["wrapped", "bfd", "bfd_split"] = "wrapped"
    """How documents become samples. wrapped: they are joined and cut; no token is dropped. bfd: documents that fit stay
    whole (best fit decreasing), padding fills the rest, and longer ones lose their end. bfd_split: longer ones
    are split, and nothing is dropped."""
    document_mask: bool = False
    """Whether attention stays within each document of a sample that has several."""
    max_train_samples: Natural = 0
    """Train on at most this many samples, of each source of `mix`; 0 is all."""
    max_eval_samples: Natural = 0
    """Evaluate and test on at most this many samples; 0 is all."""
    streaming: bool = False
    """Tokenize during training, without tokens on the disk: for datasets larger than a node's disk."""
    cache_dir: str = ""
    """Folder in which a node keeps tokenized datasets for later runs. Left out: a folder in /tmp."""

    def contradictions(self) -> Iterator[str]:
        for builder, kwargs in self.config_kwargs.items():
            for name in _TAKEN.intersection(kwargs):
                yield f"config_kwargs.{builder}.{name}: dray sets this argument itself"
        if self.mix and self.train != "builtin":
            yield (
                f"data.train = {self.train} beside [data.mix]: a run trains on one of them; leave out data.train, or "
                'make it a source: [data.mix.NAME] dataset = "..."'
            )
        if self.mix and self.streaming:
            yield "data.streaming works with data.train only; a mix reads tokens from the disk"
        if self.streaming and self.packing != "wrapped":
            yield (
                f"data.streaming joins documents as they come and cuts them; data.packing = {self.packing} wants all "
                "of them first: set data.packing=wrapped, or data.streaming=false"
            )
        weights = [source.weight for source in self.mix.values()]
        for name, source in self.mix.items():
            if dataset.is_too_light(source.weight, weights):
                yield (
                    f"data.mix.{name}.weight = {source.weight:g} of {sum(weights):g} in all is less than one sample of "
                    f"{dataset.BLOCK:,}, the smallest share of a mix"
                )


def with_text(named: str, text: str, path: Path) -> str:
    """FILE.py:FUNCTION and the file's text. The text is parsed but not run: planning runs no code of a user."""
    function = named.rpartition(":")[2]
    if secrets.is_value(text):
        raise ConfigError(
            "the file of a function on rows seems to hold a secret, and every run folder contains its text",
            where=path,
            fix="read it from a variable, such as os.environ['HF_TOKEN'], and name the variable in pass_env",
        )
    try:
        body = ast.parse(text, path.name).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            "the file of a function on rows is not valid Python",
            where=path,
            found=str(error) or type(error).__name__,
            fix="correct that file",
        ) from error
    functions = [statement.name for statement in body if isinstance(statement, ast.FunctionDef)]
    if function not in functions:
        raise ConfigError(
            f"there is no function {function}",
            where=path,
            wanted=f"def {function}(row): at the top level of the file",
            found=listed(functions) or "no function",
            fix=f"name an existing function: {path.name}:{nearest(function, functions) or 'FUNCTION'}",
        )
    return f"{path.name}:{function}\n{text}"
