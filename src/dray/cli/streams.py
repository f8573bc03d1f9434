"""What a verb is started with: standard streams, working folder and arguments."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, DrayError, UnfitError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STYLE = re.compile(r"\x1b\[[0-9;:]*m")
_PATHS = ("HOME", "HF_HOME", "XDG_CONFIG_HOME", "TMPDIR")


class _Output(io.FileIO):
    """A stream that may fail while the verb goes on: training continues if the disk is full or a pipe closed."""

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


def begin() -> None:
    """Escape control characters in what is printed, and outlive a full disk and a closed pipe.

    A closed stream (`>&-`) becomes /dev/null: else a later file gets its number, and dray's lines.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r", encoding="utf-8")
        elif number and stream is getattr(sys, f"__{name}__"):
            stream = io.TextIOWrapper(
                io.BufferedWriter(_Output(number, "w", closefd=False)),
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
            )
        setattr(sys, name, show(stream) if number else stream)


def say(line: str) -> None:
    """Print a line of progress, beside the results."""
    print(line, file=sys.stderr, flush=True)


def join_login_node() -> None:
    """Where slurm/login.sh has started this process in the image: use Slurm's commands outside, and end with the input.

    The input is a connection of ssh, at whose end no signal comes here. At the login node itself it is /dev/null.
    """
    commands = os.environ.pop("DRAY_SLURM", "")
    if not commands:
        return
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    if stat.S_ISCHR(os.fstat(0).st_mode):
        return
    connection = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()


def _end_with(connection: int) -> None:
    with suppress(ConnectionError):  # it was reset
        while os.read(connection, 4096):
            pass
    os.kill(os.getpid(), signal.SIGINT)


def _refused() -> OSError | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.refused if isinstance(raw, _Output) else None


def is_gone() -> bool:
    """Whether standard output can no longer be written: a verb that only prints may end then."""
    return _refused() is not None


def refusal() -> DrayError | None:
    """The error if output was lost; None if a reader has just closed its pipe (`| head`), or reset the connection."""
    sys.stdout.flush()
    refused = _refused()
    if refused is None or isinstance(refused, ConnectionError):
        return None
    return UnfitError("the output could not be written", where="standard output", found=refused.strerror)


def require(argv: Sequence[str]) -> None:
    """Refuse a working folder that is gone, and names that are not UTF-8: both would fail later."""
    try:
        names = {"the working folder": str(Path.cwd())}
    except OSError as gone:
        raise ConfigError("the working folder is gone", found=gone.strerror, fix="cd into one that exists") from gone
    names |= {f"argument {number}": word for number, word in enumerate(argv, start=1)}
    names |= {name: os.environ[name] for name in os.environ if name in _PATHS or name.startswith("DRAY_")}
    for where, text in names.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "a name is not UTF-8 text",
                where=where,
                wanted="UTF-8, as plans and scripts are",
                found=ascii(text),
                fix="rename it",
            ) from None


def shown(line: bytes) -> str:
    """The line for a terminal: a progress bar's last state, without control characters."""
    text = _STYLE.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
    return str(printable(text)).expandtabs()
