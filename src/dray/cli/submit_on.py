"""`dray submit --on` and `--first`: copy what the run needs to one or several remotes, and submit it there."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import on
from dray.cli.args import Chosen
from dray.config import dray_home
from dray.contract.findings import ConfigError
from dray.images import store
from dray.remote import names, ssh, transfer
from dray.remote.ssh import Connection
from dray.runs.status import LOST, NO_RESULT, QUEUED
from dray.runs.store import new_id

First = Annotated[
    str,
    typer.Option(
        "--first", metavar="REMOTE,REMOTE", help="Submit at these remotes, and keep the job that starts first."
    ),
]
_POLL_S = 30.0


def submit(remotes: str, asked: Chosen, argv: Sequence[str], *, run: str, site: str, follow: bool) -> int:
    """Run `dray submit` at this remote, or at several (`A,B`), whose first job to start stays; return the exit code."""
    if follow:
        raise ConfigError("--follow does not go with --on or --first", fix="after submitting: dray logs --on NAME -f")
    named = [names.find(name) for name in remotes.split(",")]
    recipe = asked.recipe()
    if recipe.adopted or recipe.layer:
        raise ConfigError(
            "adopted images and layers are not copied to a remote",
            found=f"adopted = {recipe.adopted!r}, layer = {recipe.layer!r}",
            fix="submit this recipe on the login node, or build an image that contains the packages",
        )
    # The digest that the recipe pins is checked here, before the file is sent.
    image = transfer.require_sif(store.required(dray_home.root(), recipe.image_name, recipe.image_digest))
    if recipe.command and not Path(os.path.normpath(recipe.command.folder)).is_relative_to(asked.beside):
        raise ConfigError(
            "the command's folder is outside the recipe's folder, which is all that dray copies to a remote",
            found=recipe.command.folder,
            fix="move it into the recipe's folder",
        )
    code = transfer.files_of(asked.beside)
    run = run or new_id(recipe.name)
    name = Path(run).name
    what = [f"./{asked.path.name}"] if asked.path else []
    what += [*asked.overrides, *(["--", *asked.command] if asked.command else [])]
    with ExitStack() as stack:
        connections = [stack.enter_context(ssh.connected(remote)) for remote in named]
        for connection in connections:
            copied = transfer.copy_image(connection, image, _say)._replace(code=f"code/{name}")
            transfer.copy_files(connection, asked.beside, code, copied.code)
            if site.endswith(".toml"):
                connection.rsync(str(Path(site).absolute()), f"sites/{name}.toml")
                profile = f"{connection.remote.path}/sites/{name}.toml"
            else:
                profile = site
            typed = ["submit", *argv, f"--run={run}", *([f"--site={profile}"] if profile else []), *what]
            if failed := on.run(connection, typed, copied):
                return failed
        if len(connections) > 1 and "--dry-run" not in argv:
            return _keep_first(connections, [run, *(word for word in argv if word.startswith("--runs="))])
    return 0


def _keep_first(connections: Sequence[Connection], run: Sequence[str]) -> int:
    """Wait until a job leaves the queue, and stop the others."""
    _say("waiting for the first job that starts; Ctrl-C leaves all jobs in the queue")
    while True:
        for connection in connections:
            answer = bytearray()
            code = connection.run(
                "verb", "", "", "", "", "status", "--json", *run, on_out=answer.extend, on_err=lambda _: None
            )
            if code or json.loads(answer)["state"] in (QUEUED, LOST, NO_RESULT):
                continue
            name = connection.remote.name
            _say(f"the job at {name} is first, and the others are stopped: dray status --on {name} {run[0]}")
            rest = [other for other in connections if other is not connection]
            return max(on.run(other, ["stop", "--no-wait", *run]) for other in rest)
        time.sleep(_POLL_S)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
