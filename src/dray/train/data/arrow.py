"""Read Parquet and Arrow files with pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dray.contract import dataset_name
from dray.train.data import files, remote

_ROWS = 1024
"""Rows that are Python's objects at a time: a stream has a file open for each of many shards."""


def row_groups(path: str) -> list[int]:
    """The number of rows of each row group of a parquet file."""
    with _damaged():
        footer = pq.ParquetFile(_file(path)).metadata
        return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]


def count(path: str) -> int:
    """The number of rows of an Arrow file; a file on a disk is mapped, not read."""
    with _damaged():
        return int(_mapped(path).num_rows)


def rows(path: str, column: str | None, groups: range, only: tuple[int, int] | None = None) -> Iterator[Any]:
    """The column's cells, in order, or whole rows; of parquet those of these row groups.

    `only` is the first of these and the one at which to end.
    """
    first, last = only or (0, 1 << 62)
    with _damaged():
        if dataset_name.ending(path) == ".parquet":
            file: Any = pq.ParquetFile(_file(path))
            _require(path, column, file.schema_arrow.names)
            columns = None if column is None else [column]
            batches: Iterable[Any] = file.iter_batches(_ROWS, row_groups=groups, columns=columns)
        else:
            mapped = _mapped(path)
            _require(path, column, mapped.schema.names)
            batches = mapped.to_batches(max_chunksize=_ROWS)
        begin = 0
        for batch in batches:
            some = batch.slice(min(max(0, first - begin), len(batch)), max(0, last - max(first, begin)))
            yield from (some if column is None else some.column(column)).to_pylist()
            begin += len(batch)
            if begin >= last:
                return


def unzstd(source: str | BinaryIO) -> BinaryIO:
    """The file without its compression; Python has zstd of its own from 3.14 on only."""
    raw = pa.OSFile(source) if isinstance(source, str) else pa.PythonFile(source)
    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))


def _require(path: str, column: str | None, names: list[str]) -> None:
    if column is not None and column not in names:
        files.no_column(path, column, names)


def _mapped(path: str) -> Any:  # noqa: ANN401  pyarrow has no types
    """Arrow's own files are of two formats, and both have the same ending."""
    try:
        return pa.ipc.open_file(_file(path, mapped=True)).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_stream(_file(path, mapped=True)).read_all()


def _file(path: str, *, mapped: bool = False) -> Any:  # noqa: ANN401  pyarrow has no types
    return (
        pa.PythonFile(remote.opened(path, buffered=mapped))
        if "://" in path
        else pa.memory_map(path)
        if mapped
        else path
    )


@contextmanager
def _damaged() -> Iterator[None]:
    """As other readers say it of their files."""
    try:
        yield
    except pa.ArrowException as error:
        raise EOFError(str(error)) from error
