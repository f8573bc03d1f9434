"""Filters what a rank or a launcher writes to its log: names replace the values of pass_env's variables."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from contextlib import suppress

from dray.contract import secrets
from dray.runner import children

PASSED = "DRAY_PASSED"  # the names in pass_env, for those of a node's processes that have no plan
_CHUNK = 65536


def passed() -> dict[str, str]:
    """The values of pass_env's variables, which no log or record may show, with their names."""
    return secrets.passed(os.environ.get(PASSED, "").split(), os.environ)


def redacted(fields: Mapping[str, object]) -> dict[str, object]:
    """A record's fields without these values."""
    values = passed()

    def clean(field: object) -> object:
        if isinstance(field, list):
            return [*map(clean, field)]
        return secrets.redacted(field, values) if isinstance(field, str) else field

    return {name: clean(field) for name, field in fields.items()}


def between() -> Filter | None:
    """The filter of a log, if pass_env names variables; else None."""
    values = passed()
    return Filter(values) if values else None


class Filter:
    """A pipe between a child's two streams and this process's own, which is the log."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self._names = {value.encode(errors="surrogateescape"): f"[{name}]".encode() for value, name in values.items()}
        self._any = re.compile(b"|".join(map(re.escape, self._names)))  # the longer ones come first
        self._held = b""

    def watch(self, supervised: children.Children) -> None:
        """Pass on the child's output whenever it writes; call this once the child has the writer."""
        os.close(self.writer)

        def call() -> None:
            if not self.pass_on():
                supervised.forget(self.reader)

        supervised.watch(self.reader, call)

    def pass_on(self, limit: int = _CHUNK) -> bool:
        """Pass on what has arrived, up to a limit; return whether anything has."""
        try:
            new = os.read(self.reader, limit)
        except BlockingIOError:
            return False
        text = self._held + new
        # The end may be the beginning of a value, whose rest is still to come.
        end = len(text) - max(_begun(text, value) for value in self._names)
        for value in self._any.finditer(text):
            if value.start() < end < value.end():
                end = value.start()
        self._held = text[end:]
        self._write(text[:end])
        return bool(new)

    def finish(self) -> None:
        """Write the rest once the child has ended; its own children may keep the pipe open, and write for ever."""
        self.pass_on(fcntl.fcntl(self.reader, fcntl.F_GETPIPE_SZ))  # all that the pipe holds
        self._write(self._held)
        self._held = b""

    def _write(self, text: bytes) -> None:
        clean = self._any.sub(lambda value: self._names[value[0]], text)
        with suppress(OSError):  # a disk that is full must not end the run
            while clean:
                clean = clean[os.write(1, clean) :]


def _begun(text: bytes, value: bytes) -> int:
    """How many bytes of the value's beginning the text ends with."""
    length = min(len(value) - 1, len(text))
    while not text.endswith(value[:length]):
        length -= 1
    return length
