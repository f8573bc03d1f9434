"""Documents from files: a document a line or row. Files are cut into pieces, so that many can read at once.

Where the pieces begin is decided by the files alone, never by who reads.
"""

from __future__ import annotations

import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dray.contract.findings import ConfigError
from dray.train.data import chat, corpus, hub, table
from dray.train.data.lines import COMPRESSED, opened, read
from dray.train.data.mapping import Map

_PIECE = 1 << 24  # bytes of a file of lines
_BUILTIN = "builtin"
_LINES, _ARROW = (".txt", ".text", ".md", ".jsonl", ".ndjson"), (".parquet", ".arrow")
_KNOWN = (*_LINES, ".json", ".csv", ".tsv", *_ARROW)


@dataclass(frozen=True)
class Reading:
    """What makes a document of a row."""

    column: str
    least: int = 0
    """Shorter ones are left out; a conversation's length is that of its JSON."""
    chats: bool = False
    """Whether a document is a conversation: its messages, as JSON."""
    answer: str = ""
    """The column of the answers, where `column` is that of the questions."""
    map: Map | None = field(default=None, repr=False)
    """The user's function, which has the rows first."""


@dataclass(frozen=True)
class Piece:
    """A part of a file: bytes of one with lines, row groups of parquet, or all of it (`end` is 0)."""

    path: str
    begin: int = 0
    end: int = 0

    def __str__(self) -> str:
        if _kind(self.path) == ".parquet":
            return f"row group {self.begin} of {self.path}"
        return f"{self.path} from byte {self.begin} on" if self.begin else self.path


def files(name: str, split: str) -> tuple[str, ...]:
    """The files of a dataset of the recipe, always in the same order."""
    if name == _BUILTIN:
        return (_BUILTIN,)
    if name.startswith("hub:"):
        return hub.dataset(name, split)
    path = Path(name)
    if path.is_dir():
        found = sorted(str(child) for child in path.rglob("*") if _kind(str(child)) in _KNOWN and child.is_file())
    else:
        found = [name] if path.exists() else sorted(map(str, path.parent.glob(path.name)))
    if not found:
        wanted = f"files of {', '.join(_KNOWN)} in it" if path.is_dir() else "a file, a folder or a pattern that fits"
        raise ConfigError(
            "the dataset does not exist", wanted=wanted, found=f"nothing at {name}", fix="check [data] in the recipe"
        )
    if odd := [one for one in found if not Path(one).is_file()]:  # a FIFO would be waited for
        problem = "the dataset is not a file"
        raise ConfigError(problem, where=odd[0], wanted="a regular file", fix="check [data] in the recipe")
    return tuple(found)


def identity(names: tuple[str, ...]) -> tuple[object, ...]:
    """What tells these files from others: it changes when they do."""
    return tuple((name, *_seen(name)) for name in names)


def _seen(name: str) -> tuple[int, ...]:
    if name == _BUILTIN:
        return ()
    with _readable(name):
        seen = os.stat(name)  # noqa: PTH116  a string, as all here
    return (seen.st_size, seen.st_mtime_ns)


def pieces(names: tuple[str, ...]) -> list[Piece]:
    """All of the files, in order."""
    found: list[Piece] = []
    for name in names:
        kind = _kind(name)
        if kind in _LINES and not name.lower().endswith(COMPRESSED):
            size = _seen(name)[0]
            found += [Piece(name, begin, min(begin + _PIECE, size)) for begin in range(0, size, _PIECE)]
        elif kind == ".parquet":
            with _readable(name):
                found += [Piece(name, group, group + 1) for group in range(_arrow().row_groups(name))]
        else:
            found.append(Piece(name))
    return found


def documents(piece: Piece, reading: Reading) -> Iterator[str]:
    """The piece's documents; what is empty or blank is none."""
    with _readable(piece.path):
        for found in _texts(piece, reading):
            if found and len(found) >= reading.least and not found.isspace():
                yield found


def _texts(piece: Piece, reading: Reading) -> Iterator[str]:
    if reading.map or reading.chats or reading.answer:
        columns = (reading.column, reading.answer) if reading.answer else (reading.column,)
        cells = zip(*(_rows(piece, column) for column in columns), strict=True)
        found = _mapped(piece, reading.map, columns) if reading.map else ((piece.path, some) for some in cells)
        yield from (_document(some, place, reading) for place, some in found)
        return
    for cell in _rows(piece, reading.column):
        if cell is not None and not isinstance(cell, str):
            _not_text(piece.path, reading.column, cell)
        yield cell or ""


def _document(cells: tuple[Any, ...], place: str, reading: Reading) -> str:
    if reading.chats and not reading.answer:
        return chat.conversation(cells[0], place, reading.column)
    for column, cell in zip((reading.column, reading.answer), cells, strict=False):
        if cell is not None and not isinstance(cell, str):
            _not_text(place, column, cell)
    return chat.exchange(*cells) if reading.answer and all(cells) else "" if reading.answer else cells[0] or ""


def _mapped(piece: Piece, function: Map, columns: tuple[str, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The cells of the rows that the function makes, and where they are from."""
    for number, row in enumerate(_rows(piece, None), start=1):
        if not isinstance(row, dict):
            _not_rows(piece, number, row)
        place = f"row {number} of {piece}"
        for one in function(row, place):
            by = f"what {function.name} of {function.file} returned for {place}"
            yield by, tuple(_cell(one, column, by) for column in columns)


def _rows(piece: Piece, column: str | None) -> Iterator[Any]:
    """The column's cells, or whole rows."""
    kind = _kind(piece.path)
    if piece.path == _BUILTIN:
        yield from (text if column is not None else {"text": text} for text in corpus.documents())
    elif kind in _ARROW:
        yield from _arrow().rows(piece.path, column, range(piece.begin, piece.end))
    elif kind in (".csv", ".tsv"):
        yield from _csv_rows(piece, column, "\t" if kind == ".tsv" else ",")
    elif kind == ".json" and _begins_with_list(piece.path):
        yield from _list_rows(piece, column)
    elif kind in (".json", ".jsonl", ".ndjson"):
        yield from _json_rows(piece, column)
    else:
        lines = (line.rstrip("\r\n") for _, line in read(piece.path, piece.begin, piece.end))
        yield from lines if column is not None else ({"text": line} for line in lines)


def _kind(name: str) -> str:
    path = Path(name.lower())
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _json_rows(piece: Piece, column: str | None) -> Iterator[Any]:
    for place, line in read(piece.path, piece.begin, piece.end):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                "a line is not JSON",
                wanted=f'an object on each line, such as {{"{column or "text"}": "..."}}',
                found=f"{error} in the line at byte {place} of {piece.path}",
                fix="correct or remove that line",
            ) from error
        yield _cell(row, column, piece.path)


def _begins_with_list(path: str) -> bool:
    with opened(path) as file:
        return file.read(1 << 12).lstrip().startswith(b"[")


def _list_rows(piece: Piece, column: str | None) -> Iterator[Any]:
    with opened(piece.path) as file:
        try:
            rows = json.load(file)
        except ValueError as error:
            raise ConfigError(
                "a file is not JSON", wanted="a list of objects", found=f"{error} in {piece.path}", fix="correct it"
            ) from error
    return (_cell(row, column, piece.path) for row in rows)


def _cell(row: object, column: str | None, path: str) -> object:
    if column is None:
        return row
    if not isinstance(row, dict) or column not in row:
        table.no_column(path, column, list(row) if isinstance(row, dict) else [type(row).__name__])
    return row[column]


def _csv_rows(piece: Piece, column: str | None, between: str) -> Iterator[Any]:
    with opened(piece.path) as file:
        yield from table.rows(file, piece.path, column, between)


def _arrow() -> ModuleType:
    """What reads parquet and Arrow: half a second of imports, and the one package that other files do not need."""
    return import_module("dray.train.data.arrow")


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """What every reader of files may find: none, no leave, or one that is cut or damaged."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        unreadable(path, error)


def _not_text(path: str, column: str, found: object) -> NoReturn:
    raise ConfigError(
        f"column {column!r} is not text",
        wanted=f"strings in {path}",
        found=f"{type(found).__name__}: {str(found)[:60]}",
        fix="set data.column to the one with the documents",
    )


def _not_rows(piece: Piece, number: int, found: object) -> NoReturn:
    raise ConfigError(
        "a row has no columns",
        where=f"row {number} of {piece}",
        wanted='an object on each line, such as {"text": "..."}, for data.map',
        found=f"{type(found).__name__}: {str(found)[:60]}",
        fix="leave out data.map, or correct that row",
    )


def unreadable(path: str, error: Exception) -> NoReturn:
    """A file that is not there, may not be read, or is broken."""
    gone = isinstance(error, OSError) and error.errno is not None
    raise ConfigError(
        "the dataset cannot be read",
        wanted=f"a whole {_kind(path).removeprefix('.') or 'text'} file at {path}",
        found=(error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]),
        fix="check [data] in the recipe" if gone else "fetch or write that file again",
    )
