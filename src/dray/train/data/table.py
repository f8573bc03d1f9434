"""Read CSV and TSV; refuse a row that would lose text."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from typing import BinaryIO, NoReturn

from dray.contract.findings import ConfigError, listed, nearest


def rows(file: BinaryIO, path: str, column: str | None, between: str) -> Iterator[str | dict[str, str]]:
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
