"""A command, a shell or JupyterLab in the container of an active run, with its mounts and environment."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import engines, interrupts, process, render
from dray.contract import files
from dray.contract.findings import ConfigError, DrayError
from dray.engines.docker import LABEL
from dray.facts import Layer
from dray.planning.schema import Plan
from dray.runs import layers
from dray.runs.status import State
from dray.runs.store import RunPaths, node_number, plan_of

JUPYTER = "jupyterlab"
_FOLDERS = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
_LOOK_S = 0.3
_WAITS = ("the run has not started yet", "try again when dray status shows that it runs")
_NOT_RUNNING = {
    "queued": _WAITS,
    "starting": _WAITS,
    "ended": ("the run has ended", "start its next attempt: dray submit --run=NAME, or dray run --run=NAME"),
    "unknown": (
        "this machine cannot tell whether the run is active",
        "run dray enter on the machine where the run was started",
    ),
}


def active_plan(state: State) -> tuple[Plan, RunPaths]:
    """The plan of the active attempt; ConfigError if none is running, or if a command cannot enter it."""
    if state.kind != "running" or state.paths is None:
        problem, fix = _NOT_RUNNING[state.kind]
        raise ConfigError(problem, where=state.path, wanted="an active run", found=state.where, fix=fix)
    plan = plan_of(state.paths)
    if engines.get(plan.engine).private_network:
        containers = f"$({plan.engine} ps --quiet --filter label={LABEL}={plan.run} | head -n1)"
        raise ConfigError(
            f"dray enter opens no container of {plan.engine}",
            where=state.path,
            wanted="a run started by Slurm or with --engine bare",
            found=plan.engine,
            fix=f"{plan.engine} exec -it {containers} bash",
        )
    return plan, state.paths


def node_of(plan: Plan, word: str) -> str:
    """The name of the node with this number or name; the first node if `word` is empty."""
    names = [node.name for node in plan.world.nodes]
    return names[node_number(names, word) if word else 0]


def argv(state: State, node: str, command: Sequence[str], *, terminal: bool, layer: Layer | None = None) -> list[str]:
    """The command line; writes its script into the attempt's folder. `layer` is used if the run has none."""
    plan, paths = active_plan(state)
    script = paths.enter_script
    if layer and plan.layer is None and engines.get(plan.engine).binds_layers:
        plan = plan.model_copy(update={"layer": layer})
        script = script.with_stem(f"{script.stem}-{layer.digest[7:19]}")
    files.write_atomic(script, render.enter_script(plan), mode=0o755)
    if state.slurm_job is None:
        return ["bash", str(script), *command]
    return [
        "srun",
        f"--jobid={state.slurm_job.number}",
        "--overlap",  # the run's own step has the node
        "--export=ALL",
        *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
        f"--nodelist={node}",
        "--cpu-bind=none",
        f"--chdir={paths.folder}",
        *(["--pty"] if terminal else []),
        *render.engine_options(plan),
        str(script),
        *command,
    ]


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without Slurm's variables of this shell's own job, which would change srun."""
    slurm = ("SLURM_", "SRUN_", "SLURMD_")
    return {name: value for name, value in env.items() if name == "SLURM_CONF" or not name.startswith(slurm)}


def jupyter(state: State, word: str, port: int, *, say: Callable[[str], None], show_token: bool) -> None:
    """Run JupyterLab on a node of the run, on that machine's loopback, until it ends or is interrupted.

    Only this user can read its token; on a terminal it is in the printed URL.
    """
    plan, paths = active_plan(state)
    node = node_of(plan, word)
    with (
        TemporaryDirectory(prefix="jupyter-", dir=paths.folder, ignore_cleanup_errors=True) as name,
        interrupts.stoppable(),
    ):
        folder, token = Path(name), secrets.token_urlsafe(32)
        settings = json.dumps({"IdentityProvider": {"token": token}})
        files.write_atomic(folder / "token", token, mode=0o600)
        files.write_atomic(folder / "jupyter_server_config.json", settings, mode=0o600)
        command = jupyter_command(plan, folder, port)
        layer = layers.made(plan.variant, JUPYTER)
        with (folder / "server.log").open("ab") as log:
            server = process.start(
                argv(state, node, command, terminal=False, layer=layer), env=environment(os.environ), output=log
            )
        try:
            host = node if state.slurm_job else ""
            for line in jupyter_lines(host, _port(plan, server, folder), token if show_token else ""):
                say(line)
            if not show_token:
                say(f"the token is in {folder / 'token'}, which only you can read")
            server.wait()
        finally:
            server.stop()


def jupyter_command(plan: Plan, folder: Path, port: int) -> list[str]:
    """JupyterLab's own command line."""
    return [
        "env",
        *(f"{name}={folder}" for name in _FOLDERS),
        *(engines.get(plan.engine).python(plan.image), "-m", JUPYTER),
        *("--no-browser", "--ip=127.0.0.1", f"--port={port}", f"--ServerApp.root_dir={plan.run_folder}"),
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]


def jupyter_lines(host: str, port: int, token: str) -> list[str]:
    """What to type on your own machine."""
    user, here = getpass.getuser(), socket.getfqdn()
    way = f"-J {user}@{here} {user}@{host}" if host else f"{user}@{here}"
    return [
        f"JupyterLab runs on {host or 'this machine'}; Ctrl-C here ends it",
        f"on your own machine: ssh -N -L {port}:127.0.0.1:{port} {way}",
        f"and open:            http://127.0.0.1:{port}/lab{'?token=' + token if token else ''}",
    ]


def _port(plan: Plan, server: process.Running, folder: Path) -> int:
    """The port that the server took, which may differ from the requested one."""
    while server.code() is None:
        for file in folder.glob("jpserver-*.json"):
            with suppress(OSError, ValueError, KeyError):  # not written yet
                return int(json.loads(files.read(file))["port"])
        time.sleep(_LOOK_S)
    last_lines = files.tail(folder / "server.log", 15)
    if any(f"No module named {JUPYTER}" in line for line in last_lines):
        raise ConfigError("JupyterLab is not in the image", wanted=JUPYTER, found="not installed", fix=_install(plan))
    raise DrayError("JupyterLab did not start", found="\n".join(last_lines), code=server.code() or 1)


def _install(plan: Plan) -> str:
    if engines.get(plan.engine).image == "python":
        return f"{plan.image} -m pip install {JUPYTER}"
    return f"dray image layer {plan.variant} --pip {JUPYTER}"
