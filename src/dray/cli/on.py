"""`--on`: run a verb at a remote."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from dray.cli import candidates
from dray.cli.streams import shown
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.remote import remotes_file, ssh
from dray.remote.ssh import Connection
from dray.remote.transfer import Copied

On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="REMOTE",
        help="Do this at a remote cluster, named by dray remote add.",
        autocompletion=candidates.remotes,
    ),
]
_LAST = Copied()
"""The image and scripts that were copied last."""
# The name of a file that a verb writes, if the user names none.
_FILE = re.compile(r"dray-(report|why)-[A-Za-z0-9._-]+\.(html|tar\.gz)\n")


def hand_over(name: str) -> None:
    """Run the typed verb at the remote and exit with its code; without a name do nothing."""
    if name:
        argv = sys.argv[1:]
        place = argv.index("--on") if "--on" in argv else argv.index(f"--on={name}")
        del argv[place : place + (2 if argv[place] == "--on" else 1)]
        with ssh.connected(remotes_file.find(name)) as connection:
            code = run(connection, argv)
        raise typer.Exit(code)


def run(connection: Connection, argv: Sequence[str], copied: Copied = _LAST) -> int:
    """Run a verb at the remote with what was `copied`; its output is passed on as it comes."""
    logs = argv[0] == "logs"
    out = _Lines(sys.stdout, raw=logs and not sys.stdout.isatty())
    err = _Lines(sys.stderr)
    try:
        return connection.run("verb", *copied, "", *argv, on_out=out, on_err=err)
    except KeyboardInterrupt:
        print("\nthe verb has ended at the remote; the run continues", file=sys.stderr)
        return 0 if logs else 130
    finally:
        out.end()
        err.end()


def bring_back(
    name: str, argv: Sequence[str], target: Path | None, runs: Path | None, require: Callable[[Path], None]
) -> None:
    """Let a verb write its file at the remote, and copy it here. `require` refuses to replace a file that must stay."""
    if target:
        require(target)
    asked = [*argv, *([f"--runs={runs}"] if runs else [])]
    err = _Lines(sys.stderr)
    with tempfile.TemporaryFile() as received:
        with ssh.connected(remotes_file.find(name)) as connection:
            code = connection.run("verb", *_LAST, "1", *asked, on_out=received.write, on_err=err)
        err.end()
        if code:
            raise typer.Exit(code)
        # A line with the file's name, and then its content. Only a name that the verb gives is accepted.
        received.seek(0)
        line = received.readline(256).decode(errors="replace")
        if not target and not _FILE.fullmatch(line):
            raise ConfigError(
                "the remote's file has an unexpected name",
                found=ascii(line),
                fix="give the FILE to write here yourself",
            )
        file = target or Path(line.rstrip())
        require(file)
        with files.replacing(file, mode=0o600) as stream:
            shutil.copyfileobj(received, stream)
    print(f"{argv[0]}: {file.absolute()}")


class _Lines:
    """Another machine's output, line by line and without control characters; `raw`: as it is."""

    def __init__(self, stream: TextIO, *, raw: bool = False) -> None:
        self._stream, self._raw, self._rest = stream, raw, b""

    def __call__(self, block: bytes) -> None:
        if self._raw:
            self._stream.buffer.write(block)
        else:
            *lines, self._rest = (self._rest + block).split(b"\n")
            self._stream.write("".join(f"{shown(line)}\n" for line in lines))
        self._stream.flush()

    def end(self) -> None:
        """Print the rest, which has no line break."""
        self._stream.write(shown(self._rest))
        self._stream.flush()
