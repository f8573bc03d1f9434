"""JupyterLab in a container, on the loopback of its machine, with a token that only this user can read."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from dray import engines, interrupts, process
from dray.clients import apptainer
from dray.config import dray_home
from dray.config.image_definition import ACCELERATORS
from dray.contract import files, node
from dray.contract.findings import ConfigError, DrayError
from dray.engines.base import DEVICES, MOUNTS, Container
from dray.images import store
from dray.runs import enter, layers
from dray.runs.status import State

PACKAGE = "jupyterlab"
_ASK = f"import importlib.util, sys; sys.exit(0 if importlib.util.find_spec({PACKAGE!r}) else 3)"
_LACKS = 3
_LOOK_S = 0.3
_FOLDERS = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")


class Place(NamedTuple):
    """Where JupyterLab runs."""

    start: Callable[[Sequence[str]], list[str]]
    """Makes the command line that runs a command there."""
    env: Mapping[str, str]
    python: str
    folder: Path
    """A folder that only this user may read, visible on both sides."""
    root: str
    """The folder that JupyterLab shows."""
    host: str
    """The compute node; empty for this machine."""
    fix: str
    """How to install JupyterLab there."""


@contextmanager
def private(parent: str | Path) -> Iterator[Path]:
    """A private folder with the token, removed at the end."""
    folder = Path(mkdtemp(prefix="jupyter-", dir=parent))
    try:
        token = secrets.token_urlsafe(32)
        settings = {"IdentityProvider": {"token": token}}
        files.write_atomic(folder / "token", token, mode=0o600)
        files.write_atomic(folder / "jupyter_server_config.json", json.dumps(settings), mode=0o600)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def in_run(state: State, word: str, folder: Path) -> Place:
    """A node of an active run, in the run's image."""
    plan, _ = enter.plan_of(state)
    if engines.get(plan.engine).private_network:
        raise ConfigError(
            f"no tunnel reaches JupyterLab here: a container of {plan.engine} has a private loopback",
            wanted="a run started by Slurm or with --engine bare",
            found=plan.engine,
            fix="dray jupyter --image VARIANT (needs Apptainer)",
        )
    name = enter.node_of(plan, word)
    layer = layers.made(plan.variant, PACKAGE)
    fix = f"dray image layer {plan.variant} --pip {PACKAGE}"
    if engines.get(plan.engine).image == "python":
        fix = f"{plan.image} -m pip install {PACKAGE}"
    elif plan.layer:  # only one layer can be bound
        fix = f"build the run's layer again with --pip {PACKAGE}: dray image layer {plan.variant} --upgrade ..."
    return Place(
        start=lambda command: enter.argv(state, name, command, terminal=False, layer=layer),
        env=enter.environment(os.environ),
        python=engines.get(plan.engine).python(plan.image),
        folder=folder,
        root=plan.run_folder,
        host=name if state.slurm_job else "",
        fix=fix,
    )


def in_image(image: str, folder: Path) -> Place:
    """This machine, in an image that sees the working folder."""
    file = store.named(dray_home.root(), image)
    if not file.is_file():
        raise ConfigError("the image does not exist", wanted=file, fix=f"make image-{image}")
    program, variant = apptainer.here(), store.variant(file)
    accelerator = ACCELERATORS.get(variant, "cpu")
    layer = layers.made(variant, PACKAGE) if variant else None
    container = Container(
        run="", image=str(file.absolute()), user="", variables=(), name_variable="", one_machine=True,
        accelerator=accelerator if node.has_gpu(accelerator) else "cpu",
        layer=layer.file if layer else "", folder=str(Path.cwd()), mounts=(),
    )  # fmt: skip
    mounts = [f'--mount=type=bind,"src={_csv(path)}","dst={_csv(path)}"' for path in (Path.cwd(), folder)]

    def start(command: Sequence[str]) -> list[str]:
        argv = engines.get("apptainer").argv(container, command)[1:]
        given: dict[str, list[str]] = {MOUNTS: mounts, DEVICES: []}
        return [program, *(one for word in argv for one in given.get(word, [word]))]

    return Place(
        start=start, env=os.environ, python="python3", folder=folder, root=str(Path.cwd()), host="",
        fix=f"dray image layer {variant or 'VARIANT'} --pip {PACKAGE}",
    )  # fmt: skip


def serve(place: Place, port: int, *, say: Callable[[str], None], show_token: bool) -> None:
    """Run JupyterLab until it ends or is interrupted."""
    log = place.folder / "server.log"
    with interrupts.stoppable(), log.open("ab") as output:
        asked = process.start(place.start([place.python, "-c", _ASK]), env=place.env, output=output)
        try:
            asked.wait()
            if code := asked.code():
                raise _refused(place, code, log)
            running = process.start(place.start(_command(place, port)), env=place.env, output=output)
        finally:
            asked.stop()
        try:
            given = _port(place, running, log)
            for line in lines(place.host, given, (place.folder / "token").read_text() if show_token else ""):
                say(line)
            if not show_token:
                say(f"the token is in {place.folder / 'token'}, which only you can read")
            running.wait()
        finally:
            running.stop()


def lines(host: str, port: int, token: str) -> Iterator[str]:
    """What to type on your own machine. The token is shown only on a terminal."""
    user, here = getpass.getuser(), socket.getfqdn()
    way = f"-J {user}@{here} {user}@{host}" if host else f"{user}@{here}"
    yield f"JupyterLab runs on {host or 'this machine'}; Ctrl-C here ends it"
    yield f"on your own machine: ssh -N -L {port}:127.0.0.1:{port} {way}"
    yield f"and open:            http://127.0.0.1:{port}/lab{'?token=' + token if token else ''}"


def _command(place: Place, port: int) -> list[str]:
    return [
        "env",
        *(f"{name}={place.folder}" for name in _FOLDERS),
        *(place.python, "-m", PACKAGE, "--no-browser", "--ip=127.0.0.1", f"--port={port}"),
        f"--ServerApp.root_dir={place.root}",
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]


def _port(place: Place, running: process.Running, log: Path) -> int:
    """The port that the server took, which may differ from the requested one."""
    while running.code() is None:
        for told in place.folder.glob("jpserver-*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):  # not written yet
                return int(json.loads(files.read(told))["port"])
        time.sleep(_LOOK_S)
    raise _refused(place, running.code() or 1, log)


def _refused(place: Place, code: int, log: Path) -> DrayError:
    if code == _LACKS:
        return ConfigError(
            "JupyterLab is not in the image", where=place.host, wanted=PACKAGE, found="not installed", fix=place.fix
        )
    return DrayError("JupyterLab did not start", where=place.host, found="\n".join(files.tail(log, 15)), code=code)


def _csv(path: Path) -> str:
    return str(path).replace('"', '""')
