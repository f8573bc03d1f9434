"""Clusters that are reached from here by ssh: name them, run verbs there, and submit there."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NoReturn, TextIO

import typer

from dray.cli.args import Chosen, complete_remotes
from dray.cli.streams import say, shown
from dray.config import dray_home
from dray.contract import files
from dray.contract.findings import ConfigError, DrayError
from dray.remote import remotes_file, ssh, transfer
from dray.remote.ssh import Connection
from dray.remote.transfer import Copied

remote_verbs = typer.Typer()


@remote_verbs.command()
def add(
    name: str,
    place: Annotated[
        str, typer.Argument(metavar="USER@HOST:/FOLDER", help="Login node as ssh takes it, and a folder there.")
    ],
) -> None:
    """Name a login node, and a folder of yours there that all nodes share. dray does not connect yet.

    NAME: Your name for the remote.

    dray remote add lumi me@lumi.csc.fi:/scratch/project_1/me/dray
    """
    added = remotes_file.parse(name, place)
    remotes_file.write(remotes_file.read() | {name: added})
    print(f"{name}: {added.place}\ndray remote check {name} shows whether it can run a job")


@remote_verbs.command("list")
def show() -> None:
    """Print the remotes, and the file where you can remove one.

    dray remote list
    """
    print(f"# {remotes_file.file()}")
    for one in remotes_file.read().values():
        print(f"{one.name}  {one.place}")
    if not remotes_file.read():
        print("no remotes; to name one: dray remote add NAME USER@HOST:/FOLDER")


@remote_verbs.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A remote's name.", autocompletion=complete_remotes)],
    image: str = "",
) -> None:
    """Log in and check what a job needs there: Slurm, Apptainer, space, and the folder, which the first login makes.

    --image VARIANT|FILE: Copy this image and dray's scripts there too.

    dray remote check lumi
    dray remote check lumi --image cpu
    """
    from dray.images import store

    remote = remotes_file.find(name)
    file = store.named(dray_home.root(), image) if image else None
    with ssh.connected(remote) as connection:
        print(connection.ask("check"), end="")
        if file:
            transfer.copy_image(connection, file, print)
    print(f"{name} can run jobs: {remote.place}")


_LAST = Copied()
"""The image and scripts that were copied last."""
# The name of a file that a verb writes, if the user names none.
_FILE = re.compile(r"dray-(report|why)-[A-Za-z0-9._-]+\.(html|tar\.gz)\n")


def hand_over(name: str) -> NoReturn:
    """Run the typed verb at the remote and exit with its code."""
    argv = sys.argv[1:]
    place = argv.index("--on") if "--on" in argv else argv.index(f"--on={name}")
    del argv[place : place + (2 if argv[place] == "--on" else 1)]
    with ssh.connected(remotes_file.find(name)) as connection:
        code = run_at(connection, argv)
    raise typer.Exit(code)


def run_at(connection: Connection, argv: Sequence[str], copied: Copied = _LAST) -> int:
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


_POLL_S = 30.0


def submit_at(remotes: Sequence[str], chosen: Chosen, argv: Sequence[str], *, run: str, site: str) -> int:
    """Run `dray submit` at this remote, or at several, whose first job to start stays; return the exit code."""
    from dray.images import store
    from dray.runs.store import new_id, run_named

    named = [remotes_file.find(name) for name in remotes]
    recipe = chosen.recipe()
    if recipe.adopted or recipe.layer:
        raise ConfigError(
            "adopted images and layers are not copied to a remote",
            fix="submit this recipe on the login node, or build an image that contains the packages",
        )
    # The digest that the recipe pins is checked here, before the file is sent.
    image = store.required(dray_home.root(), recipe.image_name, recipe.image_digest)
    code = transfer.files_of(chosen.beside)
    run = run or new_id(recipe.name)
    name = (run_named(Path("/"), run) or Path(run)).name
    arguments = [f"./{chosen.path.name}"] if chosen.path else []
    arguments += [*chosen.overrides, *(["--", *chosen.command] if chosen.command else [])]
    with ExitStack() as stack:
        connections = [stack.enter_context(ssh.connected(remote)) for remote in named]
        for connection in connections:
            copied = transfer.copy_image(connection, image, say)._replace(code=f"code/{name}")
            transfer.copy_files(connection, chosen.beside, code, copied.code)
            if site.endswith(".toml"):
                connection.rsync(site, f"sites/{name}.toml")
            profile = f"{connection.remote.path}/sites/{name}.toml" if site.endswith(".toml") else site
            typed = ["submit", *argv, f"--run={run}", *([f"--site={profile}"] if profile else []), *arguments]
            if failed := run_at(connection, typed, copied):
                if connection is not connections[0]:
                    say(f"jobs at the remotes before {connection.remote.name} stay: dray stop --on NAME {run}")
                return failed
        if len(connections) > 1 and "--dry-run" not in argv:
            return _keep_first(connections, [run, *(word for word in argv if word.startswith("--runs="))])
    return 0


def _keep_first(connections: Sequence[Connection], run: Sequence[str]) -> int:
    """Wait until a job leaves the queue, and stop the others."""
    from dray.runs.status import DONE, FAILED, LOST, QUEUED, RUNNING, STOPPED

    say("waiting for the first job that starts; Ctrl-C leaves all jobs in the queue")
    waiting = list(connections)
    while waiting:
        for connection in list(waiting):
            answer = bytearray()
            argv = ["verb", *Copied(), "", "status", "--json", *run]
            code = connection.run(*argv, on_out=answer.extend, on_err=lambda _: None)
            state = QUEUED if code else json.loads(answer)["state"]
            if state in (RUNNING, DONE, FAILED):
                waiting.remove(connection)
                name = connection.remote.name
                say(f"the job at {name} is first, and the others are stopped: dray status --on {name} {run[0]}")
                return max([0, *(run_at(other, ["stop", "--no-wait", *run]) for other in waiting)])
            if state in (LOST, STOPPED):
                waiting.remove(connection)
        time.sleep(_POLL_S)
    raise DrayError("no job has started: all have ended in the queue", fix=f"dray why --on NAME {run[0]}")


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
