"""Lines of a file, which may be compressed."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from dray.contract.files import DEPTH, too_deep
from dray.contract.findings import ConfigError
from dray.train.data import remote

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_LONGEST = 1 << 28  # bytes of one line; more is a file without line ends


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


def read(path: str, begin: int, end: int) -> Iterator[tuple[int, str]]:
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
