"""A user's function on rows, compiled from the plan's text of its file: the same on every node."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from threading import Lock
from types import ModuleType
from typing import Any, NoReturn

from dray.contract.findings import ConfigError, counted

Row = dict[str, Any]


class Map:
    """FILE.py:FUNCTION and the file's text, as a function from a row to rows. It is imported with its first row, so
    that what it keeps between rows begins anew with each dataset."""

    def __init__(self, text: str) -> None:
        self.text = text
        named, _, self._source = text.partition("\n")
        self.file, _, self.name = named.rpartition(":")
        self._function: Callable[[Row], object] | None = None
        self._importing = Lock()  # a stream's shards are read in threads
        self._rows = self._dropped = self._added = 0

    def __call__(self, row: Row, place: str) -> list[Row]:
        """The rows that the function makes of this one."""
        function = self._function or self._imported()
        wanted = "None, a dict or a list of dicts"
        try:
            found = function(row)
        except (Exception, SystemExit) as error:
            self._fail(f"{self.name} of {self.file} failed", error, f"{wanted} for {place}")
        rows = [] if found is None else [found] if isinstance(found, dict) else found
        odd = [one for one in rows if not isinstance(one, dict)] if isinstance(rows, list) else [rows]
        if odd or not isinstance(rows, list):
            raise ConfigError(
                f"{self.name} of {self.file} did not return rows",
                where=place,
                wanted=wanted,
                found=f"{type(odd[0]).__name__}{' in a list' * isinstance(rows, list)}: {str(odd[0])[:60]}",
                fix=self._fix,
            )
        self._rows += 1
        self._dropped += not rows
        self._added += max(0, len(rows) - 1)
        return rows

    @property
    def told(self) -> str:
        """How many rows the function has read, dropped and added, for the log."""
        counts = f"{counted(self._rows, 'row')} read, {self._dropped:,} dropped, {self._added:,} added"
        return f"{self.name} of {self.file}: {counts}"

    @property
    def _fix(self) -> str:
        return f"correct {self.file}, then check it: dray data inspect RECIPE"

    def _imported(self) -> Callable[[Row], object]:
        with self._importing:
            if self._function is None:
                module = ModuleType(f"dray_map_{self.file.removesuffix('.py')}")
                module.__file__ = self.file
                sys.modules[module.__name__] = module  # where dataclasses look for theirs
                try:
                    exec(compile(self._source, self.file, "exec"), module.__dict__)  # noqa: S102  the user's own
                    self._function = module.__dict__[self.name]
                except (Exception, SystemExit) as error:
                    self._fail(f"{self.file} cannot be imported", error, "a file that imports only what the image has")
            return self._function

    def _fail(self, problem: str, error: BaseException, wanted: str) -> NoReturn:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self.file]
        raise ConfigError(
            problem,
            where=f"{self.file}:{lines[-1]}" if lines else self.file,
            wanted=wanted,
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            fix=self._fix,
        ) from error
