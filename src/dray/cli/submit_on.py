"""`dray submit --on` and `--first`: copy what the run needs to one or several remotes, and submit it there."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dray.cli import on
from dray.cli.args import Chosen
from dray.cli.streams import say
from dray.config import dray_home
from dray.contract.findings import ConfigError, DrayError
from dray.images import store
from dray.remote import remotes_file, ssh, transfer
from dray.remote.ssh import Connection
from dray.remote.transfer import Copied
from dray.runs.status import DONE, FAILED, LOST, QUEUED, RUNNING, STOPPED
from dray.runs.store import new_id, run_named

_POLL_S = 30.0


def submit(remotes: Sequence[str], chosen: Chosen, argv: Sequence[str], *, run: str, site: str) -> int:
    """Run `dray submit` at this remote, or at several, whose first job to start stays; return the exit code."""
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
            if failed := on.run(connection, typed, copied):
                if connection is not connections[0]:
                    say(f"jobs at the remotes before {connection.remote.name} stay: dray stop --on NAME {run}")
                return failed
        if len(connections) > 1 and "--dry-run" not in argv:
            return _keep_first(connections, [run, *(word for word in argv if word.startswith("--runs="))])
    return 0


def _keep_first(connections: Sequence[Connection], run: Sequence[str]) -> int:
    """Wait until a job leaves the queue, and stop the others."""
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
                return max([0, *(on.run(other, ["stop", "--no-wait", *run]) for other in waiting)])
            if state in (LOST, STOPPED):
                waiting.remove(connection)
        time.sleep(_POLL_S)
    raise DrayError("no job has started: all have ended in the queue", fix=f"dray why --on NAME {run[0]}")
