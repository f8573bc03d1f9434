"""Documents from files: a document a line or row. Files are cut into pieces, so that many can read at once.

Where the pieces begin follows from the files and from how many readers there are in all, never from who reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from itertools import islice, pairwise
from types import ModuleType
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

from dray.contract.dataset_name import BUILTIN, ending
from dray.contract.findings import ConfigError
from dray.train.data import builders, chat, corpus, files, remote
from dray.train.data.files import ARROW, LINES, builder_of, identity, opened, parsed, readable
from dray.train.data.mapping import Map
from dray.train.data.remote import Seen

_PIECE, _LEAST = 1 << 24, 1 << 14  # bytes of a file of lines; of a piece of it, where readers are many
_AT_ONCE = 32  # footers


@dataclass(frozen=True)
class Reading:
    """How a row becomes a document."""

    column: str
    least: int = 0
    """Skip documents shorter than this many characters; a conversation counts as its JSON."""
    chats: bool = False
    """Whether a document is a conversation: its messages, as JSON."""
    answer: str = ""
    """The column of the answers, where `column` is that of the questions."""
    map: Map | None = field(default=None, repr=False)
    """The user's function, which has the rows first."""
    config_kwargs: str = "{}"
    """load_dataset's options for each builder, as JSON."""

    def options(self, builder: str) -> str:
        """Those of one builder."""
        return json.dumps(json.loads(self.config_kwargs).get(builder, {}), sort_keys=True)


@dataclass(frozen=True)
class Piece:
    """A part of a file: bytes of one with lines, row groups of parquet, or all of it (`end` is 0)."""

    path: str
    """The path, after `BUILDER:` if a builder reads it."""
    begin: int = 0
    end: int = 0
    rows: tuple[int, int] | None = None
    """The range of its rows to read; None is all."""
    seen: Seen | None = None
    """A remote file's size and version when dray found it, to notice a change."""

    def __str__(self) -> str:
        if ending(self.path) == ".parquet":
            return f"row group {self.begin} of {self.path}"
        return f"{self.path} from byte {self.begin} on" if self.begin else self.path


def pieces(names: tuple[str, ...], seen: tuple[tuple[object, ...], ...] = ()) -> list[Piece]:
    """All of the files, in order. `seen` is their identity, where that is known."""
    found: list[Piece] = []
    seen = seen or identity(names)
    _ask_for_footers(seen)
    for name, (_, *one) in zip(names, seen, strict=True):
        kind, far = ending(name), cast(Seen, tuple(one)) if "://" in name else None
        if builder_of(name)[0] or name == BUILTIN:
            found.append(Piece(name, seen=far))
        elif kind in LINES and not _is_compressed(name):
            size = int(cast(int, one[0]))
            found += [Piece(name, begin, min(begin + _PIECE, size), seen=far) for begin in range(0, size, _PIECE)]
        elif kind == ".parquet":
            found += [Piece(name, group, group + 1, seen=far) for group in range(len(_row_groups(name, far)))]
        else:
            found.append(Piece(name, seen=far))
    return found


def _ask_for_footers(seen: tuple[tuple[object, ...], ...]) -> None:
    """Of parquet that is elsewhere, many at once: each answer takes its time."""
    far = [(str(name), cast(Seen, tuple(one))) for name, *one in seen if "://" in str(name)]
    far = [one for one in far if ending(one[0]) == ".parquet" and not builder_of(one[0])[0]]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(lambda one: _row_groups(*one), far))


def _row_groups(path: str, seen: Seen | None) -> tuple[int, ...]:
    """How many rows each of its row groups has."""
    with readable(path):
        return _footer(path, seen) if seen else tuple(_arrow().row_groups(path))


@lru_cache(maxsize=1 << 16)
def _footer(path: str, seen: Seen) -> tuple[int, ...]:
    del seen  # another file has another footer
    return tuple(_arrow().row_groups(path))


def cut(found: list[Piece], readers: int, reading: Reading) -> list[Piece]:
    """Pieces for so many readers, where a part of one can be read without what is before it."""
    parts = -(-readers // max(1, len(found)))
    return [part for piece in found for part in _cut(piece, parts, reading)] if parts > 1 else found


def _cut(piece: Piece, parts: int, reading: Reading) -> Iterator[Piece]:
    by_rows = _in_arrow(piece.path) and bool(piece.end or not piece.seen)  # one of Arrow's elsewhere comes as a whole
    if not by_rows and (piece.rows or not piece.end):
        yield piece
        return
    begin, end = (piece.rows or (0, count(piece, reading))) if by_rows else (piece.begin, piece.end)
    parts = max(1, min(parts, (end - begin) // (1 if by_rows else _LEAST)))
    bounds = [begin + (end - begin) * part // parts for part in range(parts + 1)]
    for first, last in pairwise(bounds):
        yield replace(piece, rows=(first, last)) if by_rows else replace(piece, begin=first, end=last)


def count(piece: Piece, reading: Reading) -> int:
    """How many rows it has: as parquet and Arrow's files tell, else by reading it."""
    if _in_arrow(piece.path) and ending(piece.path) == ".parquet":
        return _row_groups(piece.path, piece.seen)[piece.begin]
    with readable(piece.path):
        if _in_arrow(piece.path):
            return cast(int, _arrow().count(piece.path))
        return sum(1 for _ in _rows(piece, None, reading))


def documents(piece: Piece, reading: Reading) -> Iterator[str]:
    """The piece's documents; what is empty or blank is none."""
    with readable(piece.path):
        _require_same(piece)
        for found in _texts(piece, reading):
            if found and len(found) >= reading.least and not found.isspace():
                yield found
        _require_same(piece)


def _require_same(piece: Piece) -> None:
    """Refuse a file that is elsewhere and was replaced: other ranks, or another attempt, have read the one before."""
    if piece.seen and (now := remote.seen([builder_of(piece.path)[1]])[0]) != piece.seen:
        raise ConfigError(
            "the dataset changed while it was read",
            where=builder_of(piece.path)[1],
            wanted=f"{piece.seen[0]:,} bytes, {piece.seen[1]}",
            found=f"{now[0]:,} bytes, {now[1]}",
            fix="submit again; name files that do not change, or a revision",
        )


def _texts(piece: Piece, reading: Reading) -> Iterator[str]:
    if reading.map or reading.chats or reading.answer:
        columns = (reading.column, reading.answer) if reading.answer else (reading.column,)
        cells = zip(*(_rows(piece, column, reading) for column in columns), strict=True)
        found = _mapped(piece, reading, reading.map, columns) if reading.map else ((piece.path, some) for some in cells)
        yield from (_document(some, place, reading) for place, some in found)
        return
    for cell in _rows(piece, reading.column, reading):
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


def _mapped(
    piece: Piece, reading: Reading, function: Map, columns: tuple[str, ...]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The cells of the rows that the function makes, and where they are from."""
    for number, row in enumerate(_rows(piece, None, reading), start=1 + (piece.rows or (0, 0))[0]):
        if not isinstance(row, dict):
            _not_rows(piece, number, row)
        place = f"row {number} of {piece}"
        for one in function(row, place):
            by = f"what {function.name} of {function.file} returned for {place}"
            yield by, tuple(_cell(one, column, by) for column in columns)


def _rows(piece: Piece, column: str | None, reading: Reading) -> Iterator[Any]:
    """The column's cells, or whole rows."""
    if _in_arrow(piece.path):
        return cast(Iterator[Any], _arrow().rows(piece.path, column, range(piece.begin, piece.end), piece.rows))
    return islice(_all_rows(piece, column, reading), *(piece.rows or (None,)))


def _all_rows(piece: Piece, column: str | None, reading: Reading) -> Iterator[Any]:
    kind, (builder, path) = ending(piece.path), builder_of(piece.path)
    if builder:
        yield from builders.rows(builder, path, column, reading.options(builder))
    elif piece.path == BUILTIN:
        yield from (text if column is not None else {"text": text} for text in corpus.documents())
    elif kind in (".csv", ".tsv"):
        yield from _csv_rows(piece, column, "\t" if kind == ".tsv" else ",")
    elif kind == ".json" and _begins_with_list(piece.path):
        yield from _list_rows(piece, column)
    elif kind in (".json", ".jsonl", ".ndjson"):
        yield from _json_rows(piece, column)
    else:
        lines = (line.rstrip("\r\n") for _, line in files.lines(piece.path, piece.begin, piece.end))
        yield from lines if column is not None else ({"text": line} for line in lines)


def _in_arrow(name: str) -> bool:
    """Whether pyarrow reads it, which finds a row without making those before it."""
    return ending(name) in ARROW and not builder_of(name)[0]


def _is_compressed(name: str) -> bool:
    return (urlsplit(name).path if "://" in name else name).lower().endswith(files.COMPRESSED)


def _json_rows(piece: Piece, column: str | None) -> Iterator[Any]:
    for place, line in files.lines(piece.path, piece.begin, piece.end):
        if line.isspace():
            continue
        try:
            row = parsed(line)
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
            rows = parsed(file.read())
        except ValueError as error:
            raise ConfigError(
                "a file is not JSON", wanted="a list of objects", found=f"{error} in {piece.path}", fix="correct it"
            ) from error
    return (_cell(row, column, piece.path) for row in rows)


def _cell(row: object, column: str | None, path: str) -> object:
    if column is None:
        return row
    if not isinstance(row, dict) or column not in row:
        files.no_column(path, column, list(row) if isinstance(row, dict) else [type(row).__name__])
    return row[column]


def _csv_rows(piece: Piece, column: str | None, between: str) -> Iterator[Any]:
    with opened(piece.path) as file:
        yield from files.table(file, piece.path, column, between)


def _arrow() -> ModuleType:
    """What reads parquet and Arrow: half a second of imports, and the one package that other files do not need."""
    return import_module("dray.train.data.arrow")


def _not_text(path: str, column: str, found: object) -> NoReturn:
    raise ConfigError(
        f"column {column!r} is not text",
        wanted=f"strings in {path}",
        found=f"{type(found).__name__}: {str(found)[:60]}",
        fix="set data.column to the column that holds the documents",
    )


def _not_rows(piece: Piece, number: int, found: object) -> NoReturn:
    raise ConfigError(
        "a row has no columns",
        where=f"row {number} of {piece}",
        wanted='an object on each line, such as {"text": "..."}, for data.map',
        found=f"{type(found).__name__}: {str(found)[:60]}",
        fix="correct that row, or remove data.map",
    )
