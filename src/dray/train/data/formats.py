"""The rows of files as documents: a reader for each format, also of compressed files, and the user's function."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import json
import lzma
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from io import BufferedReader, TextIOWrapper
from itertools import accumulate, islice, pairwise
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from threading import Lock
from types import ModuleType
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

from dray.contract.findings import ConfigError, DrayError, counted, listed
from dray.contract.trainer.dataset import BUILDERS, BUILTIN, ending
from dray.train.data import encoding, remote, synthetic_corpus
from dray.train.data.remote import Version
from dray.train.errors import described

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
LINES, ARROW = (".txt", ".text", ".md", ".jsonl", ".ndjson"), (".parquet", ".arrow")
OWN_ENDINGS = (*LINES, ".json", ".csv", ".tsv", *ARROW)
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_TAR_ENDS = 1024  # bytes of zeros

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


class Map:
    """FILE.py:FUNCTION and the file's text, as a function from a row to rows. It is imported with its first row, so
    that what it keeps between rows begins anew with each dataset."""

    def __init__(self, text: str) -> None:
        self.text = text
        named, _, self._source = text.partition("\n")
        self.file, _, self.name = named.rpartition(":")
        self._function: Callable[[Row], Any] | None = None
        self._importing = Lock()  # a stream's shards are read in threads
        self._rows = self._dropped = self._added = 0

    def __call__(self, row: Row, place: str) -> list[Row]:
        """The rows that the function makes of this one."""
        try:
            with self._importing:
                function = self._function = self._function or self._imported()
            made = function(row)
        except (Exception, SystemExit) as error:
            raise self._failed(error, place) from error
        rows = [made] if isinstance(made, dict) else [] if made is None else made
        if not isinstance(rows, list) or not all(isinstance(new, dict) for new in rows):
            raise ConfigError(
                f"{self.name} of {self.file} did not return rows",
                where=place,
                wanted="None, a dict or a list of dicts",
                found=f"{type(made).__name__}: {str(made)[:60]}",
                fix=self._fix,
            )
        self._rows += 1
        self._dropped += not rows
        self._added += max(0, len(rows) - 1)
        return rows

    @property
    def summary(self) -> str:
        """How many rows the function has read, dropped and added, for the log."""
        counts = f"{counted(self._rows, 'row')} read, {self._dropped:,} dropped, {self._added:,} added"
        return f"{self.name} of {self.file}: {counts}"

    @property
    def _fix(self) -> str:
        return f"correct {self.file}, then check it: dray data inspect RECIPE"

    def _imported(self) -> Callable[[Row], Any]:
        module = ModuleType(f"dray_map_{self.file.removesuffix('.py')}")
        module.__file__ = self.file
        sys.modules[module.__name__] = module  # where dataclasses look for theirs
        exec(compile(self._source, self.file, "exec"), module.__dict__)  # noqa: S102  the user's own
        function: Callable[[Row], Any] = module.__dict__[self.name]
        return function

    def _failed(self, error: BaseException, place: str) -> ConfigError:
        """The user's error with the line of the file and the row."""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        return ConfigError(
            f"{self.name} of {self.file} failed",
            where=f"{self.file}:{lines[-1]}" if lines else self.file,
            wanted=f"None, a dict or a list of dicts for {place}",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            fix=self._fix,
        )


def documents(piece: Piece, reading: Reading) -> Iterator[str]:
    """The piece's documents; what is empty or blank is none."""
    columns = [reading.column] + [reading.answer] * bool(reading.answer)
    first = piece.rows[0] if piece.rows else 0
    is_plain = not (reading.map or reading.answer or reading.is_conversation)
    with refusing_damage(piece.path):
        for number, row in enumerate(_rows(piece, None if reading.map else columns, reading), first + 1):
            cell = row.get(reading.column) if is_plain and isinstance(row, dict) else None
            # Most rows are plain text, and millions of them: a row's place is written only for the others.
            texts = [cell] if isinstance(cell, str) else _texts(row, f"row {number} of {piece}", columns, reading)
            for text in texts:
                if len(text) >= reading.min_characters and text and not text.isspace():
                    yield text
        _require_same(piece)


def count(piece: Piece, reading: Reading) -> int:
    """How many rows it has; a file without groups has to be read."""
    if piece.rows:
        return piece.rows[1] - piece.rows[0]
    with refusing_damage(piece.path):
        return sum(1 for _ in _rows(piece, None, reading))


def builder_of(name: str) -> tuple[str, str]:
    """A file's builder, or nothing, and its path."""
    builder, colon, path = name.partition(":")
    return (builder, path) if colon and builder in BUILDERS and not path.startswith("//") else ("", name)


def has_lines(name: str) -> bool:
    """Whether reading may begin at any byte of the file."""
    return ending(name) in LINES and not builder_of(name)[0] and _compression(name) not in COMPRESSED


def has_groups(path: str) -> bool:
    """Whether some of its rows can be read without those before them; a remote Arrow file is read as a whole."""
    return _in_arrow(path) and (ending(path) == ".parquet" or "://" not in path)


def groups(path: str) -> list[tuple[int, int]]:
    """The first row of each group of a file, and the one after its last."""
    with refusing_damage(path):
        return [*pairwise(accumulate(_arrow().group_sizes(path), initial=0))]


def slice_bounds(split: str, total: int) -> list[tuple[int, int]]:
    """The first and last row of each slice, such as train[:1%], of so many rows."""
    rows = "train[" + split.partition("[")[2]  # a split of the hub may have a name that it does not take
    instructions = _datasets_library().ReadInstruction.from_spec(rows).to_absolute({"train": total})
    return [(instruction.from_, instruction.to) for instruction in instructions]


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
        no_column(place, columns[0], [type(row).__name__])
    rows = [row]
    if function := reading.map:
        rows, place = function(row, place), f"what {function.name} of {function.file} returned for {place}"
    for mapped in rows:
        cells = []
        for column in columns:
            if column not in mapped:
                no_column(place, column, [*mapped])
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
        rows: Iterator[Row] = builder_rows(builder, path, reading.config_kwargs.get(builder, {}))
    elif path == BUILTIN:
        rows = _of_column(synthetic_corpus.documents(), columns)
    elif kind in (".csv", ".tsv"):
        rows = _csv_rows(path, "\t" if kind == ".tsv" else ",")
    elif kind in (".json", ".jsonl", ".ndjson"):
        rows = _json_rows(piece)
    else:
        rows = _of_column((line.rstrip("\r\n") for _, line in lines(path, *(piece.bytes or ()))), columns)
    yield from islice(rows, *(piece.rows or (None,)))


def _in_arrow(path: str) -> bool:
    return ending(path) in ARROW and not builder_of(path)[0]


def _arrow() -> ModuleType:
    """dray's use of pyarrow, which takes half a second to import, and which only some files need."""
    return import_module("dray.train.data.arrow")


def builder_rows(builder: str, path: str, options: Mapping[str, Any]) -> Iterator[Row]:
    """The rows by a builder of `datasets`; `options` are load_dataset's for it.

    dray turns off all that `datasets` does beside reading: it runs no code of a dataset, asks no hub, keeps nothing
    in a cache, and loses no row in silence.
    """
    number = 0
    if builder == "webdataset" and path.lower().endswith(".tar"):
        _require_whole_tar(path)
    try:
        with TemporaryDirectory(prefix="dray-datasets-") as cache:  # a stream uses it only until it is open
            dataset = _datasets_library().load_dataset(
                builder, data_files={"train": [path]}, split="train", streaming=True, cache_dir=cache,
                **options,
            )  # fmt: skip
        for row in dataset:
            yield row
            number += 1
    except (DrayError, OSError, EOFError, MemoryError):
        raise
    except ImportError as error:
        raise remote.missing_package(error.name or builder, f"{builder}:", str(error)) from error
    except Exception as error:  # of which builders have many kinds
        if remote.is_networks(error):
            raise
        raise ConfigError(
            "a shard of the dataset cannot be read",
            where=f"after row {number} of {builder}:{path}",
            wanted=f"rows that the datasets builder {builder} can read",
            found=described(error.__cause__ or error.__context__ or error),
            fix="write that file again; or set data.config_kwargs for its builder",
        ) from error


def _require_whole_tar(path: str) -> None:
    """Python's tarfile takes an archive that ends between two files for a whole one."""
    with opened(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAR_ENDS))
        if file.read() != bytes(_TAR_ENDS):
            raise EOFError("the tar archive is cut off: the two empty blocks at its end are missing")


def _datasets_library() -> Any:  # noqa: ANN401  it has no types
    import datasets  # noqa: PLC0415  a second, and its packages are of the images and the training stack alone

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each use of a builder is told to the hub
    datasets.config.STREAMING_READ_MAX_RETRIES = 1  # dray's own file systems have tried again
    remote.register()
    return datasets


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
    with TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as text:
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


def lines(path: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, str]]:
    """The lines that begin in that part of the file, each with the byte where it begins."""
    with opened(path) as file:
        place = begin
        if place:  # the line that is under way here began in the piece before
            file.seek(place - 1)
            place += len(file.readline()) - 1
        while (end is None or place < end) and (line := file.readline()):
            yield place, line.decode("utf-8" if place else "utf-8-sig")  # with the mark that some editors write
            place += len(line)


def opened(path: str) -> BufferedReader:
    """The file, as it was before it was compressed."""
    kind = _compression(path)
    if kind == ".zst":
        return cast(BufferedReader, import_module("dray.train.data.arrow").unzstd(path))
    source = remote.opened(path) if "://" in path else path
    if kind in _OPENERS:
        return cast(BufferedReader, _OPENERS[kind](source))
    return Path(source).open("rb") if isinstance(source, str) else cast(BufferedReader, source)


def _compression(path: str) -> str:
    """The last part of the file's name, which names its compression."""
    return PurePosixPath(urlsplit(path).path if "://" in path else path).suffix.lower()


@contextmanager
def refusing_damage(path: str) -> Iterator[None]:
    """Turn errors of a reader into a ConfigError: the file is missing, forbidden, cut off or damaged."""
    path = builder_of(path)[1]
    try:
        with remote.refusing_failures(path) if "://" in path else nullcontext():
            yield
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the dataset is not UTF-8", where=path, found=error, fix=f"convert it: iconv -f LATIN1 -t UTF-8 '{path}'"
        ) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(
            "the dataset cannot be read",
            wanted=f"a whole {ending(path).removeprefix('.') or 'text'} file at {path}",
            found=getattr(error, "strerror", None) or str(error).partition("\n")[0],
            fix="check [data] in the recipe; or fetch or write that file again",
        ) from error


def no_column(path: str, column: str, found: list[str]) -> NoReturn:
    """Refuse a dataset without this column."""
    raise ConfigError(
        f"there is no column {column!r}",
        wanted=f"{column} in {path}",
        found=listed(map(str, found)) or "none",
        fix="set data.column to one of these",
    )
