"""A user's function on rows, compiled from the plan's text of its file: the same on every node."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from threading import Lock
from types import ModuleType
from typing import Any

from dray.contract.findings import ConfigError, counted

Row = dict[str, Any]


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
