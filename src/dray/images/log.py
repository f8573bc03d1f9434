"""A build's output: all of it in a file, the steps' lines for the user, the last lines for an error."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from dray.errors import DrayError

# Apptainer's line comes before a minute of silence.
_SHOWN = ("dray: ", "INFO:    Creating SIF file")


class BuildLog:
    """Takes a build's lines one at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self._last: deque[str] = deque(maxlen=15)

    def __enter__(self) -> BuildLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def line(self, text: str) -> None:
        """One line of output, without its line end."""
        print(text, file=self._file, flush=True)
        self._last.append(text)
        if text.startswith(_SHOWN):
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """An error that says nothing of its cause gets the last lines, and the place of all of them."""
        try:
            yield
        except DrayError as error:
            if self._last:
                error.details.setdefault("found", "\n".join(self._last))
                error.details.setdefault("where", str(self.path))
            raise
