"""The rows of files as documents: a reader for each format."""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import accumulate, islice, pairwise
from types import ModuleType
from typing import Any

from dray.contract.dataset_name import BUILTIN, ending
from dray.contract.findings import ConfigError
from dray.train.data import datasets_builders, encoding, files, remote, synthetic_corpus
from dray.train.data.files import ARROW, builder_of, lines, opened, refusing_damage
from dray.train.data.map_function import Map
from dray.train.data.remote import Version

Row = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """How a row becomes a document."""

    column: str
    min_characters: int = 0
    """Skip documents shorter than this many characters; a conversation counts as its JSON."""
    is_conversation: bool = False
    """Whether a document is a conversation: its messages, as JSON."""
    answer: str = ""
    """The column of the answers, where `column` is that of the questions."""
    map: Map | None = field(default=None, repr=False)
    """The user's function, which has the rows first."""
    config_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """load_dataset's options for each builder."""


@dataclass(frozen=True)
class Piece:
    """A part of a file: from byte to byte of one with lines, or from row to row; without either, all of it."""

    path: str
    """The path, after `BUILDER:` if a builder reads it."""
    bytes: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None
    version: Version | None = None
    """A remote file's size and version when dray found it, to notice a change."""

    def __str__(self) -> str:
        return f"{self.path} from byte {self.bytes[0]} on" if self.bytes and self.bytes[0] else self.path

    def part(self, first: int, last: int) -> Piece:
        """These of its rows."""
        start = self.rows[0] if self.rows else 0
        return replace(self, rows=(start + first, start + last))


def has_groups(path: str) -> bool:
    """Whether some of its rows can be read without those before them; a remote Arrow file is read as a whole."""
    return _in_arrow(path) and (ending(path) == ".parquet" or "://" not in path)


def groups(path: str) -> list[tuple[int, int]]:
    """The first row of each group of a file, and the one after its last."""
    with refusing_damage(path):
        return [*pairwise(accumulate(_arrow().group_sizes(path), initial=0))]


def _in_arrow(path: str) -> bool:
    return ending(path) in ARROW and not builder_of(path)[0]


def _arrow() -> ModuleType:
    """dray's use of pyarrow, which takes half a second to import, and which only some files need."""
    return import_module("dray.train.data.arrow")


def documents(piece: Piece, reading: Reading) -> Iterator[str]:
    """The piece's documents; what is empty or blank is none."""
    columns = [reading.column] + [reading.answer] * bool(reading.answer)
    first = piece.rows[0] if piece.rows else 0
    with refusing_damage(piece.path):
        for number, row in enumerate(_rows(piece, None if reading.map else columns, reading), first + 1):
            for text in _texts(row, f"row {number} of {piece}", columns, reading):
                if len(text) >= reading.min_characters and text and not text.isspace():
                    yield text
        _require_same(piece)


def count(piece: Piece, reading: Reading) -> int:
    """How many rows it has; a file without groups has to be read."""
    if piece.rows:
        return piece.rows[1] - piece.rows[0]
    with refusing_damage(piece.path):
        return sum(1 for _ in _rows(piece, None, reading))


def _require_same(piece: Piece) -> None:
    """Refuse a remote file that was replaced: other ranks, or another attempt, have read the one before."""
    url = builder_of(piece.path)[1]
    if piece.version and (now := remote.versions([url])[0]) != piece.version:
        raise ConfigError(
            "the dataset changed while it was read",
            where=url,
            wanted=f"{piece.version[0]:,} bytes, {piece.version[1]}",
            found=f"{now[0]:,} bytes, {now[1]}",
            fix="submit again; name files that do not change, or a revision",
        )


def _texts(row: object, place: str, columns: list[str], reading: Reading) -> Iterator[str]:
    """The documents of one row."""
    if not isinstance(row, dict):
        files.no_column(place, columns[0], [type(row).__name__])
    rows = [row]
    if function := reading.map:
        rows, place = function(row, place), f"what {function.name} of {function.file} returned for {place}"
    for mapped in rows:
        cells = []
        for column in columns:
            if column not in mapped:
                files.no_column(place, column, [*mapped])
            cells.append(mapped[column])
        if reading.is_conversation and not reading.answer:
            yield encoding.conversation(cells[0], place, reading.column)
            continue
        for column, cell in zip(columns, cells, strict=True):
            if not isinstance(cell, str | None):
                raise ConfigError(
                    f"column {column!r} is not text",
                    where=place,
                    wanted="strings",
                    found=f"{type(cell).__name__}: {str(cell)[:60]}",
                    fix="set data.column to the column that holds the documents",
                )
        if not reading.answer:
            yield cells[0] or ""
        elif all(cells):
            yield encoding.exchange(*cells)


def _rows(piece: Piece, columns: list[str] | None, reading: Reading) -> Iterator[Row]:
    """The rows, at least with these columns."""
    builder, path = builder_of(piece.path)
    kind = ending(path)
    if _in_arrow(piece.path):
        yield from _arrow().rows(path, columns, piece.rows)
        return
    if builder:
        rows: Iterator[Row] = datasets_builders.rows(builder, path, reading.config_kwargs.get(builder, {}))
    elif path == BUILTIN:
        rows = _of_column(synthetic_corpus.documents(), columns)
    elif kind in (".csv", ".tsv"):
        rows = _csv_rows(path, "\t" if kind == ".tsv" else ",")
    elif kind in (".json", ".jsonl", ".ndjson"):
        rows = _json_rows(piece)
    else:
        rows = _of_column((line.rstrip("\r\n") for _, line in lines(path, *(piece.bytes or ()))), columns)
    yield from islice(rows, *(piece.rows or (None,)))


def _of_column(texts: Iterator[str], columns: list[str] | None) -> Iterator[Row]:
    """Texts as the only column, whatever data.column is."""
    column = columns[0] if columns else "text"
    return ({column: text} for text in texts)


def _json_rows(piece: Piece) -> Iterator[Row]:
    if ending(piece.path) == ".json":
        with opened(piece.path) as file:
            if file.peek(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                yield from parsed(file.read(), piece.path)
                return
    for place, line in lines(piece.path, *(piece.bytes or ())):
        if not line.isspace():
            yield parsed(line, f"the line at byte {place} of {piece.path}")


def parsed(text: str | bytes, place: str) -> Any:  # noqa: ANN401  any JSON value
    """Parse JSON of a dataset."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "the dataset is not JSON",
            where=place,
            wanted='an object on each line, such as {"text": "..."}; in .json also a list of objects',
            found=error,
            fix="correct or remove it",
        ) from error


def _csv_rows(path: str, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as text:
        # strict: else a quote that nobody closes makes one document of the rest of the file.
        table = csv.DictReader(text, delimiter=delimiter, strict=True)
        try:
            names = table.fieldnames or ()
            if len(set(names)) < len(names):
                raise csv.Error(f"two columns have the same name: {', '.join(names)}")
            for row in table:
                if None in row or None in row.values():  # else what follows a comma in a text is lost
                    raise csv.Error(f"not {len(names)} fields (quote a field with a {delimiter!r} in it)")
                yield row
        except csv.Error as error:
            raise ConfigError(
                "the table cannot be read",
                where=f"line {table.line_num} of {path}",
                wanted="column names in the first line, and as many fields in each row",
                found=error,
                fix="correct that row (a quote may be unclosed), or convert the file to parquet",
            ) from error
