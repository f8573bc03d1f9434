"""Read Parquet and Arrow files with pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dray.contract.trainer import dataset
from dray.train.data import formats, remote

_ROWS = 1024
"""Rows that are Python's objects at a time: a stream has a file open for each of many shards."""


def group_sizes(path: str) -> list[int]:
    """The number of rows of each row group of a parquet file, or of each batch of an Arrow file."""
    with _damaged():
        if dataset.ending(path) == ".parquet":
            return _sizes(pq.ParquetFile(_file(path)))
        return [len(batch) for batch in _table(path).to_batches()]


def rows(path: str, columns: list[str] | None, only: tuple[int, int] | None) -> Iterator[dict[str, Any]]:
    """The rows, or `only` those from the first to before the last, with these columns."""
    first, last = only or (0, 1 << 62)
    begin = 0
    with _damaged():
        if dataset.ending(path) == ".parquet":
            file: Any = pq.ParquetFile(_file(path))
            _require(path, columns, file.schema_arrow.names)
            groups = list[int]()
            for group, size in enumerate(_sizes(file)):
                if not groups and begin + size <= first:
                    begin += size
                else:
                    groups.append(group)
            batches: Iterable[Any] = file.iter_batches(_ROWS, row_groups=groups, columns=columns)
        else:
            table = _table(path)
            _require(path, columns, table.schema.names)
            batches = (table.select(columns) if columns else table).to_batches(max_chunksize=_ROWS)
        for batch in batches:
            if begin >= last:
                return
            start = max(0, first - begin)
            yield from batch.slice(start, max(0, last - begin - start)).to_pylist()
            begin += len(batch)


def unzstd(path: str) -> io.BufferedReader:
    """The file without its compression; Python has zstd of its own from 3.14 on only."""
    return io.BufferedReader(pa.CompressedInputStream(_mapped(path), "zstd"))


def _sizes(file: Any) -> list[int]:  # noqa: ANN401  pyarrow has no types
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def _require(path: str, columns: list[str] | None, names: list[str]) -> None:
    for column in columns or ():
        if column not in names:
            formats.no_column(path, column, names)


def _table(path: str) -> Any:  # noqa: ANN401  pyarrow has no types
    """Arrow's own files are of two formats, and both have the same ending."""
    source = _mapped(path)
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _mapped(path: str) -> Any:  # noqa: ANN401  pyarrow has no types
    return pa.PythonFile(remote.opened(path)) if "://" in path else pa.memory_map(path)


def _file(path: str) -> Any:  # noqa: ANN401  pyarrow has no types
    return pa.PythonFile(remote.opened(path, buffered=False)) if "://" in path else path


@contextmanager
def _damaged() -> Iterator[None]:
    """As other readers say it of their files."""
    try:
        yield
    except pa.ArrowException as error:
        raise EOFError(str(error)) from error
