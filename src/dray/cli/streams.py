"""What a verb is started with: standard streams, working folder and arguments."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, DrayError, UnfitError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STYLE = re.compile(r"\x1b\[[0-9;:]*m")
_PATHS = ("HOME", "HF_HOME", "XDG_CONFIG_HOME", "TMPDIR")


class _Output(io.FileIO):
    """Standard output that may fail while the verb goes on: training continues if the disk is full or a pipe closed."""

    refused: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as refused:
            self.refused = self.refused or refused
            return memoryview(data).nbytes


class Shown:
    """A stream without control characters: recipes, sites and run folders may be other people's.

    rich writes to the stream behind it, for colours and bars: its input must be `printable` already.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write the text with its control characters escaped."""
        return self.rich_proxied_file.write(printable(text))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever a stream has
        return getattr(self.rich_proxied_file, name)


def show(stream: TextIO) -> TextIO:
    """The stream with control characters escaped."""
    return cast("TextIO", stream if isinstance(stream, Shown) else Shown(stream))


class Streams:
    """The standard streams, with control characters escaped. A closed one (`>&-`) becomes /dev/null: else a later file
    gets its number, and dray's lines."""

    def __init__(self) -> None:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
        self._out = _Output(1, "w", closefd=False)
        if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout = io.TextIOWrapper(
                io.BufferedWriter(self._out),
                encoding=sys.stdout.encoding,
                errors="backslashreplace",
                line_buffering=sys.stdout.line_buffering,
            )
        sys.stdout, sys.stderr = show(sys.stdout), show(sys.stderr)

    def refusal(self) -> DrayError | None:
        """The error if output was lost; None if a reader has just closed its pipe (`| head`)."""
        sys.stdout.flush()
        refused = self._out.refused
        if refused is None or isinstance(refused, BrokenPipeError):
            return None
        return UnfitError("the output could not be written", where="standard output", found=refused.strerror)


def is_gone() -> bool:
    """Whether standard output can no longer be written: a verb that only prints may end then."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Output) and raw.refused is not None


def settle() -> None:
    """Drop what cannot be written: else Python tries again at its end, and exits with 120."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is None:  # dray was started with it closed
            continue
        try:
            stream.flush()
        except OSError:  # a full disk or a closed pipe
            silence(number)


def silence(number: int) -> None:
    """Send the rest of this stream to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def require(argv: Sequence[str]) -> None:
    """Refuse a working folder that is gone, and names that are not UTF-8: both would fail later."""
    names = {f"argument {number}": word for number, word in enumerate(argv, start=1)}
    names |= {name: os.environ[name] for name in os.environ if name in _PATHS or name.startswith("DRAY_")}
    try:
        names["the working folder"] = str(Path.cwd())
    except OSError as gone:
        raise ConfigError("the working folder is gone", found=gone.strerror, fix="cd into one that exists") from gone
    for where, text in names.items():
        if not text.isascii() and "\\udc" in ascii(text):
            raise ConfigError(
                "a name is not UTF-8 text",
                where=where,
                wanted="UTF-8, as plans and scripts are",
                found=ascii(text),
                fix="rename it",
            )


def shown(line: bytes) -> str:
    """The line for a terminal: a progress bar's last state, without control characters."""
    text = _STYLE.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
    return str(printable(text)).expandtabs()
