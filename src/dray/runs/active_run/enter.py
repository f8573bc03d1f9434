"""A command, a shell or JupyterLab in the container of an active run, with its mounts and environment."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from dray import engines, render
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.engines.docker import LABEL
from dray.facts import Layer
from dray.planning.schema import Plan
from dray.runs.status import State
from dray.runs.store import RunPaths, node_number, plan_of

JUPYTER = "jupyterlab"
_FOLDERS = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")


def active_plan(state: State) -> tuple[Plan, RunPaths]:
    """The plan of the active attempt; ConfigError if none is running, or if a command cannot enter it."""
    if state.kind != "running" or state.paths is None:
        raise ConfigError(
            "no attempt of the run is active on this machine or cluster",
            where=state.path,
            found=f"{state.state} ({state.where})" if state.where else state.state,
            fix="dray status shows when it starts; dray submit --run=NAME continues a run that has ended",
        )
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
    if layer and plan.layer is None and engines.get(plan.engine).binds_layers:
        plan = plan.model_copy(update={"layer": layer})
    files.write_atomic(paths.enter_script, render.enter_script(plan), mode=0o755)
    if state.slurm_job is None:
        return ["bash", str(paths.enter_script), *command]
    return [
        "srun",
        f"--jobid={state.slurm_job.number}",
        "--overlap",  # the run's own step has the node
        "--export=ALL",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--nodelist={node}",
        "--cpu-bind=none",
        f"--chdir={paths.folder}",
        *(["--pty"] if terminal else []),
        *render.engine_options(plan),
        str(paths.enter_script),
        *command,
    ]


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without Slurm's variables of this shell's own job, which would change srun."""
    slurm = ("SLURM_", "SRUN_", "SLURMD_")
    return {name: value for name, value in env.items() if name == "SLURM_CONF" or not name.startswith(slurm)}


def jupyter(plan: Plan, folder: Path, port: int) -> list[str]:
    """JupyterLab's command line. It listens on the node's loopback, and prints its URL with the token; only this user
    can read its own `folder`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    return [
        "env",
        *(f"{name}={folder}" for name in _FOLDERS),
        engines.get(plan.engine).python(plan.image),
        "-m",
        JUPYTER,
        "--no-browser",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",  # the tunnel has this port
        f"--ServerApp.root_dir={plan.run_folder}",
        "--ServerApp.answer_yes=True",
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]


def tunnel(host: str, port: int) -> str:
    """What to type on your own machine, to reach the port of a node; without one, of this machine."""
    user, here = getpass.getuser(), socket.getfqdn()
    way = f"-J {user}@{here} {user}@{host}" if host else f"{user}@{here}"
    return f"ssh -N -L {port}:127.0.0.1:{port} {way}"


def install(plan: Plan) -> str:
    """What adds JupyterLab, which dray's images lack."""
    if engines.get(plan.engine).image == "python":
        return f"{plan.image} -m pip install {JUPYTER}"
    return f"dray image layer {plan.variant} --pip {JUPYTER}"
