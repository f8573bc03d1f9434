"""What a verb is started with and did not choose: its streams, its folder, its words."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.contract.values import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STYLE = re.compile(r"\x1b\[[0-9;:]*m")
_PATHS = ("HOME", "HF_HOME", "XDG_CONFIG_HOME", "TMPDIR")


class _Output(io.FileIO):
    """Standard output that a verb outlives: a training goes on where its terminal's log is full or gone."""

    refused: OSError | None = None
    _taken = b""
    """What was written as Ctrl-C came. The buffer over this one was not told so, and hands it over once more."""

    def write(self, data: ReadableBuffer, /) -> int:
        taken, self._taken = self._taken, b""
        if taken and bytes(data).startswith(taken):
            return len(taken)
        count: list[int | None] = []
        try:
            count.extend(map(super().write, (data,)))  # one call: an interrupt comes before it or after it
        except OSError as refused:
            self.refused = self.refused or refused
            return memoryview(data).nbytes
        except KeyboardInterrupt:
            self._taken = bytes(data)[: (count or [0])[0] or 0]
            raise
        return count[0]  # type: ignore[return-value]  # None where a pipe that does not wait is full


class Shown:
    """A stream that sends its terminal nothing but text: recipes, sites and run folders are other people's too.

    rich takes the stream behind it, for its colours and bars: what it is given must be `printable` already.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """The text, with escapes for what a terminal would obey."""
        return self.rich_proxied_file.write(printable(text))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever a stream has
        return getattr(self.rich_proxied_file, name)


def show(stream: TextIO) -> TextIO:
    """The same stream, through which nothing but text goes."""
    return cast("TextIO", stream if isinstance(stream, Shown) else Shown(stream))


class Streams:
    """Closed ones become /dev/null, so that no file that is opened later takes their number and gets our lines."""

    def __init__(self) -> None:
        for number in range(3):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)
        devnull = os.devnull
        sys.stdin = sys.stdin or open(devnull, encoding="utf-8")  # noqa: PTH123, SIM115
        sys.stderr = sys.stderr or open(devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        sys.stdout = sys.stdout or open(devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        self._out: _Output | None = None
        if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
            self._out = _Output(1, "w", closefd=False)
            sys.stdout = io.TextIOWrapper(
                io.BufferedWriter(self._out), encoding=sys.stdout.encoding, errors="backslashreplace",
                line_buffering=sys.stdout.line_buffering,
            )  # fmt: skip
        sys.stdout, sys.stderr = show(sys.stdout), show(sys.stderr)

    def refusal(self) -> DrayError | None:
        """Why not all that was printed has arrived; a reader that has gone (`| head`) wanted no more."""
        sys.stdout.flush()
        refused = self._out.refused if self._out else None
        if refused is None or isinstance(refused, BrokenPipeError):
            return None
        return UnfitError("the output could not be written", where="standard output", found=refused.strerror)


def is_gone() -> bool:
    """Whether nobody takes what is printed any more: a verb that only prints has nothing left to do."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Output) and raw.refused is not None


def settle() -> None:
    """Give up what no stream takes: Python would try once more at its end, and make 120 of the exit code."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream:
                stream.flush()
        except OSError:  # a full disk or a closed pipe
            silence(number)


def silence(number: int) -> None:
    """Send to /dev/null whatever this stream is still given."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def require(argv: Sequence[str]) -> None:
    """Refuse what would fail in the middle: a working folder that is gone, and names that no file of ours can hold."""
    try:
        folder = str(Path.cwd())
    except OSError as gone:
        raise ConfigError("the working folder is gone", found=gone.strerror, fix="cd into one that exists") from gone
    named = {f"argument {number}": word for number, word in enumerate(argv, start=1)}
    named |= {name: os.environ[name] for name in os.environ if name in _PATHS or name.startswith("DRAY_")}
    for where, text in (named | {"the working folder": folder}).items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "a name is not UTF-8 text", where=where, wanted="UTF-8, as plans and scripts are", found=ascii(text),
                fix="rename it",
            ) from None  # fmt: skip


def shown(line: bytes) -> str:
    """As a terminal may be sent it: of a bar that draws over itself the last state, and nothing that moves a cursor."""
    text = _STYLE.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
    return str(printable(text)).expandtabs()
