"""The files of a dataset: find them, tell one version from another, and read lines and tables, also compressed ones."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn, cast
from urllib.parse import urlsplit

from dray.contract.dataset_name import BUILDERS, BUILTIN, ENDINGS, ending
from dray.contract.files import DEPTH, too_deep
from dray.contract.findings import ConfigError, listed, nearest
from dray.train.data import remote

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_LONGEST = 1 << 28  # bytes of one line; more is a file without line ends
LINES, ARROW = (".txt", ".text", ".md", ".jsonl", ".ndjson"), (".parquet", ".arrow")
_KNOWN = (*LINES, ".json", ".csv", ".tsv", *ARROW)
_ENDINGS = ENDINGS | {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".text": "text",
    ".parquet": "parquet", ".arrow": "arrow", ".conll": "conll", ".conllu": "conll", ".fasta": "fasta", ".fa": "fasta",
    ".fastq": "fastq", ".fq": "fastq", ".gb": "genbank", ".gbk": "genbank", ".tsfile": "tsfile", ".vortex": "vortex",
}  # fmt: skip


def find(place: str, builder: str = "") -> tuple[str, ...]:
    """The files of a path, a folder, a pattern or a URL, always in the same order; each behind its builder's name."""
    if place == BUILTIN:
        return (BUILTIN,)
    found = remote.files(place, _folder(builder)) if "://" in place else _on_disk(place, builder)
    if not found:
        wanted = f"a folder with files that end in {listed(_folder(builder))}"
        wanted = wanted if Path(place).is_dir() else "a file, a folder, or a pattern that matches files"
        fix = "check [data] in the recipe"
        raise ConfigError("the dataset does not exist", wanted=wanted, found=f"nothing at {place}", fix=fix)
    if odd := [one for one in found if _is_odd(one, builder)]:
        problem = "the dataset is not a file"
        raise ConfigError(problem, where=odd[0], wanted="a regular file", fix="check [data] in the recipe")
    return tuple(f"{kind}:{one}" if (kind := builder or ENDINGS.get(ending(one), "")) else one for one in found)


def _on_disk(place: str, builder: str) -> list[str]:
    path = Path(place)
    if path.is_dir() and not place.endswith(".lance"):  # which is a folder itself
        endings = _folder(builder)
        return sorted(str(one) for one in path.rglob("*") if one.is_file() and str(one).lower().endswith(endings))
    return [place] if path.exists() else sorted(map(str, path.parent.glob(path.name)))


def _folder(builder: str) -> tuple[str, ...]:
    """The endings of the files that a folder is searched for."""
    own = [ending for ending, kind in _ENDINGS.items() if kind == builder] if builder else [*_KNOWN]
    return tuple(f"{ending}{more}" for ending in own for more in ("", *COMPRESSED))


def _is_odd(path: str, builder: str) -> bool:
    """Whether it is no file: a FIFO would be waited for."""
    if "://" in path or ((builder == "lance" or path.endswith(".lance")) and Path(path).is_dir()):
        return False
    return not Path(path).is_file()


def identity(names: tuple[str, ...]) -> tuple[tuple[object, ...], ...]:
    """The identity of these files; it changes when they change."""
    far = dict(zip(urls := [builder_of(name)[1] for name in names if "://" in name], remote.seen(urls), strict=True))
    return tuple((name, *(far[builder_of(name)[1]] if "://" in name else _stat(name))) for name in names)


def builder_of(name: str) -> tuple[str, str]:
    """A file's builder, or nothing, and its path."""
    builder, colon, path = name.partition(":")
    return (builder, path) if colon and builder in BUILDERS and not path.startswith("//") else ("", name)


def _stat(name: str) -> tuple[int, ...]:
    if name == BUILTIN:
        return ()
    with readable(path := builder_of(name)[1]):
        found = [os.stat(path)]  # noqa: PTH116  a string, as all here
        if Path(path).is_dir():
            found = [one.stat() for one in Path(path).rglob("*") if one.is_file()] or found
    return (sum(one.st_size for one in found), max(one.st_mtime_ns for one in found))


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn errors of a reader into a ConfigError: the file is missing, forbidden, cut off or damaged."""
    path = builder_of(path)[1]
    try:
        with remote.reading(path) if "://" in path else nullcontext():
            yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        known = error if isinstance(error, OSError) else None
        raise ConfigError(
            "the dataset cannot be read",
            wanted=f"a whole {ending(path).removeprefix('.') or 'text'} file at {path}",
            found=known.strerror if known and known.strerror else str(error).partition("\n")[0],
            fix="check [data] in the recipe" if known and known.errno else "fetch or write that file again",
        ) from error


def opened(path: str) -> BinaryIO:
    """The file, as it was before it was compressed; in one piece, since none can be read from its middle."""
    kind = PurePosixPath(urlsplit(path).path if "://" in path else path).suffix.lower()
    source = remote.opened(path) if "://" in path else path
    if kind == ".zst":
        return cast(BinaryIO, import_module("dray.train.data.arrow").unzstd(source))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    if kind in openers:
        return cast(BinaryIO, openers[kind](source))
    return Path(path).open("rb") if isinstance(source, str) else source


def lines(path: str, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """The lines that begin in that part of the file, each with the byte where it begins; `end` is 0 for all of it."""
    with opened(path) as file:
        place = begin
        if place:  # the line that is under way here began in the piece before
            file.seek(place - 1)
            place += len(file.readline(_LONGEST)) - 1
        while not end or place < end:
            line = file.readline(_LONGEST)
            if not line:
                return
            if len(line) == _LONGEST:
                raise ConfigError(
                    "a line is too long to be a document",
                    wanted=f"lines of less than {_LONGEST >> 20} MiB",
                    found=f"a longer line at byte {place} of {path}",
                    fix="put each document on its own line, or convert the dataset to parquet",
                )
            text = _decoded(line, place, path)
            yield place, text if place else text.removeprefix("\ufeff")  # the mark that some editors write
            place += len(line)


def _decoded(line: bytes, place: int, path: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the dataset is not UTF-8",
            wanted="UTF-8",
            found=f"byte 0x{line[error.start]:02x} at byte {place + error.start} of {path}",
            fix=f"convert it: iconv -f LATIN1 -t UTF-8 '{path}'",
        ) from error


def parsed(text: str | bytes) -> Any:  # noqa: ANN401  any JSON value
    """Parse JSON of a dataset; ValueError if it is invalid or nested too deeply."""
    try:
        value = json.loads(text)
        deep = too_deep(value)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"more than {DEPTH} nested lists or objects")
    return value


def table(file: BinaryIO, path: str, column: str | None, between: str) -> Iterator[str | dict[str, str]]:
    """The column's fields, in order, or whole rows."""
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        # strict: else a quote that nobody closes makes one document of the rest of the file.
        found = csv.DictReader(text, delimiter=between, strict=True)
        try:
            names = found.fieldnames or ()
            if column is not None and column not in names:
                no_column(path, column, list(names))
            for name in names if column is None else [column]:
                if list(names).count(name) > 1:
                    raise csv.Error(f"several columns are named {name}")
            for row in found:
                if None in row or None in row.values():  # else what follows a comma in a text is lost
                    fields = sum(value is not None for name, value in row.items() if name) + len(row.get(None) or ())
                    hint = f"quote a field with a {between!r} in it"
                    raise csv.Error(f"{fields} fields in a row of {len(names)} columns ({hint})")
                yield row if column is None else row[column]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(
                "the table cannot be read",
                wanted="UTF-8, with column names in the first line",
                found=f"{error} near line {found.line_num} of {path}",
                fix="correct that row (a quote may be unclosed), or convert the file to parquet",
            ) from error


def no_column(path: str, column: str, found: list[str]) -> NoReturn:
    """Refuse a dataset without this column."""
    near = nearest(column, map(str, found))
    raise ConfigError(
        f"there is no column {column!r}",
        wanted=f"{column} in {path}",
        found=listed(map(str, found)) or "none",
        fix=f"set data.column{near and f' to {near}'}",
    )
