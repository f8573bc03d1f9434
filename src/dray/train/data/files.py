"""The files of a dataset: find them, tell one version from another, and open them, also compressed ones."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

from dray.contract.findings import ConfigError, listed
from dray.contract.trainer.dataset import BUILDERS, BUILTIN, ENDINGS, ending
from dray.train.data import remote

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
LINES, ARROW = (".txt", ".text", ".md", ".jsonl", ".ndjson"), (".parquet", ".arrow")
_KNOWN = (*LINES, ".json", ".csv", ".tsv", *ARROW)
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

Identity = tuple[tuple[Any, ...], ...]
"""Files, each with what tells one version of it from another: a time, or a URL's size and tag."""


def find(place: str, builder: str = "") -> tuple[str, ...]:
    """The files of a path, a folder, a pattern or a URL, in order; BUILDER:FILE if a builder of `datasets` reads it."""
    if place == BUILTIN:
        return (BUILTIN,)
    known = (f".{builder}", *(end for end, kind in ENDINGS.items() if kind == builder)) if builder else _KNOWN
    endings = tuple(f"{end}{more}" for end in known for more in ("", *COMPRESSED))
    files = remote.files(place, endings) if "://" in place else _on_disk(place, endings)
    if not files:
        raise ConfigError(
            "the dataset does not exist",
            wanted=f"a file, a pattern that matches files, or a folder with files that end in {listed(known)}",
            found=f"nothing at {place}",
            fix="check [data] in the recipe",
        )
    kinds = [builder or ENDINGS.get(ending(file), "") for file in files]
    return tuple(f"{kind}:{file}" if kind else file for kind, file in zip(kinds, files, strict=True))


def _on_disk(place: str, endings: tuple[str, ...]) -> list[str]:
    path = Path(place)
    if path.is_dir():
        return sorted(str(file) for file in path.rglob("*") if file.is_file() and str(file).lower().endswith(endings))
    return [place] if path.exists() else sorted(map(str, path.parent.glob(path.name)))


def builder_of(name: str) -> tuple[str, str]:
    """A file's builder, or nothing, and its path."""
    builder, colon, path = name.partition(":")
    return (builder, path) if colon and builder in BUILDERS and not path.startswith("//") else ("", name)


def has_lines(name: str) -> bool:
    """Whether reading may begin at any byte of the file."""
    return ending(name) in LINES and not builder_of(name)[0] and _compression(name) not in COMPRESSED


def _compression(path: str) -> str:
    """The last part of the file's name, which names its compression."""
    return PurePosixPath(urlsplit(path).path if "://" in path else path).suffix.lower()


def identity(names: tuple[str, ...]) -> Identity:
    """The identity of these files; it changes when they change."""
    urls = [name for name in names if "://" in name]
    tags = dict(zip(urls, remote.versions([builder_of(url)[1] for url in urls]), strict=True))
    return tuple((name, *(tags[name] if name in tags else _size_and_time(name))) for name in names)


def _size_and_time(name: str) -> tuple[int, ...]:
    if name == BUILTIN:
        return ()
    with refusing_damage(path := builder_of(name)[1]):
        stat = os.stat(path)  # noqa: PTH116  a string, as all here
    return stat.st_size, stat.st_mtime_ns


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


def opened(path: str) -> BufferedReader:
    """The file, as it was before it was compressed."""
    kind = _compression(path)
    if kind == ".zst":
        return cast(BufferedReader, import_module("dray.train.data.arrow").unzstd(path))
    source = remote.opened(path) if "://" in path else path
    if kind in _OPENERS:
        return cast(BufferedReader, _OPENERS[kind](source))
    return Path(source).open("rb") if isinstance(source, str) else cast(BufferedReader, source)


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


def no_column(path: str, column: str, found: list[str]) -> NoReturn:
    """Refuse a dataset without this column."""
    raise ConfigError(
        f"there is no column {column!r}",
        wanted=f"{column} in {path}",
        found=listed(map(str, found)) or "none",
        fix="set data.column to one of these",
    )
