"""`--on`: run a verb at a remote."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, TextIO

import typer

from dray.cli import candidates
from dray.cli.streams import shown
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.remote import names, ssh
from dray.remote.ssh import Brought, Connection

On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="REMOTE",
        help="Do this at a remote cluster, named by dray remote add.",
        autocompletion=candidates.remotes,
    ),
]
_LAST = Brought()
"""The image and scripts that were brought last."""
_NAMES = {"report": r"dray-report-[A-Za-z0-9._-]+\.html", "why": r"dray-why-[A-Za-z0-9._-]+\.tar\.gz"}
_MODES = {"report": 0o644, "why": 0o600}
"""The mode of the file that a verb writes."""
_LEFT = {
    "logs": "the run goes on",
    "stop": "if the run was asked already, it still saves and ends; dray status --on {remote} shows it",
}
"""What to print after a Ctrl-C here."""
_LINE, _MOST = 256, 1 << 30
"""The most bytes of such a file's name, and of the file."""


def hand_over(name: str) -> None:
    """Run the typed verb at the remote and exit with its code; without a name do nothing."""
    if name:
        with ssh.connected(names.find(name)) as connection:
            code = run(connection, typed())
        raise typer.Exit(code)


def bring_back(
    name: str, argv: Sequence[str], target: Path | None, runs: Path | None, require: Callable[[Path], None]
) -> None:
    """Let a verb write its file at the remote, and copy it here. `require` refuses to replace a file that must stay."""
    asked = [*argv, *([f"--runs={runs}"] if runs else [])]
    if target:
        require(target)
    with ssh.connected(names.find(name)) as connection:
        written = fetch(connection, asked, target, require)
    print(f"{argv[0]}: {written.absolute()}")


def typed() -> list[str]:
    """The command line without its --on."""
    argv, kept = iter(sys.argv[1:]), list[str]()
    for word in argv:
        if word == "--":
            return [*kept, word, *argv]
        if word == "--on":
            next(argv, None)
        elif not word.startswith("--on="):
            kept.append(word)
    return kept


def run(connection: Connection, argv: Sequence[str], brought: Brought = _LAST) -> int:
    """Run a verb at the remote with what was `brought`; its output is passed on as it comes."""
    logs = argv[0] == "logs"
    out = _Lines(sys.stdout, shown if logs else ssh.shown, raw=logs and not sys.stdout.isatty())
    err = _Lines(sys.stderr, ssh.shown)
    path = connection.remote.path
    try:
        return connection.run("verb", path, *brought, "", *argv, on_out=out, on_err=err)
    except KeyboardInterrupt:
        left = _LEFT.get(argv[0], "ended there too").format(remote=connection.remote.name)
        print(f"\n{left}", file=sys.stderr)
        return 0 if argv[0] == "logs" else 130
    finally:
        out.end()
        err.end()


def fetch(connection: Connection, argv: Sequence[str], target: Path | None, require: Callable[[Path], None]) -> Path:
    """Copy the file that a verb writes at the remote, under its own name or as `target`."""
    err = _Lines(sys.stderr, ssh.shown)
    try:
        with ExitStack() as stack:
            file = _File(stack, argv[0], target, require)
            code = connection.run("verb", connection.remote.path, *_LAST, "1", *argv, on_out=file, on_err=err)
            err.end()
            if code:
                raise typer.Exit(code)
            return file.path()
    except OSError as error:
        raise ConfigError("the file cannot be written", where=error.filename, found=error.strerror or error) from error


class _File:
    """Receives a line with a name, and then a file's content. Only a name that the verb gives is accepted.

    The file is written as it comes, and gets its name when `stack` ends.
    """

    def __init__(self, stack: ExitStack, verb: str, target: Path | None, require: Callable[[Path], None]) -> None:
        self._stack, self._names, self._mode = stack, _NAMES[verb], _MODES[verb]
        self._target, self._require = target, require
        self._head, self._size = b"", 0
        self._stream: IO[bytes] | None = None

    def __call__(self, block: bytes) -> None:
        if not self._stream:
            self._head += block
            if b"\n" not in self._head and len(self._head) < _LINE:
                return
            block = self._head.partition(b"\n")[2]
            self._require(self.path())
            self._stream = self._stack.enter_context(files.replacing(self.path(), mode=self._mode))
        self._size += len(block)
        if self._size > _MOST:
            raise ConfigError(
                "the remote's file is too large", wanted=f"at most {_MOST >> 20:,} MiB", fix="copy it with scp or rsync"
            )
        self._stream.write(block)

    def path(self) -> Path:
        """The path to write."""
        name, line, _ = self._head.partition(b"\n")
        own = name.decode("utf-8", "replace")
        if not line or (self._target is None and not re.fullmatch(self._names, own)):
            raise ConfigError(
                "the remote's file has an unexpected name", found=ascii(own), fix="give the FILE to write here yourself"
            )
        return self._target or Path(own)


class _Lines:
    """Another machine's output, line by line and without control characters; `raw`: as it is."""

    def __init__(self, stream: TextIO, form: Callable[[bytes], str], *, raw: bool = False) -> None:
        self._stream, self._form, self._raw, self._rest = stream, form, raw, b""

    def __call__(self, block: bytes) -> None:
        if self._raw:
            self._stream.buffer.write(block)
        else:
            *lines, self._rest = (self._rest + block).split(b"\n")
            self._stream.write("".join(f"{self._form(line)}\n" for line in lines))
        self._stream.flush()

    def end(self) -> None:
        """Print the rest, which has no line break."""
        self._stream.write(self._form(self._rest))
        self._rest = b""
        self._stream.flush()
