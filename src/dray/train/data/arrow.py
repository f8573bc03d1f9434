"""Parquet and Arrow's own files, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dray.train.data import table


def row_groups(path: str) -> int:
    """How many a parquet file has."""
    with _damaged():
        return int(pq.ParquetFile(path).num_row_groups)


def rows(path: str, column: str, groups: range) -> Iterator[Any]:
    """The column's cells, in order; of parquet those of these row groups."""
    with _damaged():
        file = pq.ParquetFile(path) if path.lower().endswith(".parquet") else None
        mapped = _mapped(path) if file is None else None
        names = mapped.schema.names if file is None else file.schema_arrow.names
        if column not in names:
            table.no_column(path, column, names)
        for batch in mapped.to_batches() if file is None else file.iter_batches(row_groups=groups, columns=[column]):
            yield from batch.column(column).to_pylist()


def _mapped(path: str) -> Any:  # noqa: ANN401  pyarrow has no types
    """Arrow's own files are of two formats, and both have the same ending."""
    try:
        return pa.ipc.open_file(pa.memory_map(path)).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_stream(pa.memory_map(path)).read_all()


@contextmanager
def _damaged() -> Iterator[None]:
    """As other readers say it of their files."""
    try:
        yield
    except pa.ArrowException as error:
        raise EOFError(str(error)) from error
