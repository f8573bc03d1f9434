"""A shell or a command in the container of an active run, with the plan's engine, mounts and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dray import engines, process, render
from dray.contract import files
from dray.contract.early_variables import is_early
from dray.contract.findings import ConfigError
from dray.engines.docker import LABEL
from dray.facts import Layer
from dray.planning.schema import Plan
from dray.runs.status import State
from dray.runs.store import RunPaths, node_number
from dray.runs.write import read

_NOT_RUNNING = {
    "queued": ("the run waits in the queue", "wait until it has started"),
    "starting": ("the run has no plan yet: its job is starting", "try again in a few seconds"),
    "ended": ("the run has ended", "start its next attempt: dray submit --run=NAME, or dray run --run=NAME"),
    "unknown": (
        "this machine cannot tell whether the run is active",
        "run dray enter on the machine where the run was started",
    ),
}


def plan_of(state: State) -> tuple[Plan, RunPaths]:
    """The plan of the active attempt; ConfigError if none is running."""
    if state.kind != "running" or state.paths is None:
        problem, fix = _NOT_RUNNING.get(state.kind, _NOT_RUNNING["ended"])
        raise ConfigError(problem, where=state.path, wanted="an active run", found=state.where, fix=fix)
    return read(state.paths), state.paths


def node_of(plan: Plan, word: str) -> str:
    """The name of the node with this number or name; the first node if `word` is empty."""
    names = [node.name for node in plan.world.nodes]
    return names[node_number(names, word) if word else 0]


def argv(state: State, node: str, command: Sequence[str], *, terminal: bool, layer: Layer | None = None) -> list[str]:
    """The command line; writes its script into the attempt's folder. `layer` is used if the run has none."""
    plan, paths = plan_of(state)
    script = paths.enter_script
    if layer and plan.layer is None and engines.get(plan.engine).binds_layers:
        plan = plan.model_copy(update={"layer": layer})
        script = script.with_stem(f"{script.stem}-{layer.digest[7:19]}")
    if engines.get(plan.engine).private_network:
        return _beside(plan, node, command, terminal=terminal)
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
    return {
        name: value
        for name, value in env.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SRUN_", "SLURMD_"))
    }


def variables(plan: Plan) -> dict[str, str]:
    """What the runner sets in a container of Docker or Podman; `docker exec` takes the values from its own environment.

    Other engines start another container, and enter.sh sets its variables.
    """
    if not engines.get(plan.engine).private_network:
        return {}
    set_before = {variable.name for variable in plan.env if is_early(variable.name)} | {*plan.pass_env}
    return {variable.name: variable.value for variable in plan.env if variable.name not in set_before}


def _beside(plan: Plan, node: str, command: Sequence[str], *, terminal: bool) -> list[str]:
    """The command line for Docker and Podman, which start a process in the container itself."""
    engine = plan.engine
    found = process.run([engine, "ps", "--quiet", f"--filter=label={LABEL}={plan.run}"], seconds=30).out.split()
    hosts = (
        process.run([engine, "inspect", "--format={{.Config.Hostname}}", *found], seconds=30).out.split()
        if found
        else []
    )
    own = [one for one, host in zip(found, hosts, strict=True) if host == node or not plan.world.one_machine]
    if not own:
        raise ConfigError(
            f"{engine} has no container for this node on this machine",
            where=plan.run,
            wanted=node,
            found=" ".join(hosts) or "none",
        )
    streams = ["--interactive", *(["--tty"] if terminal else [])]
    environment = [f"--env={name}" for name in variables(plan)]
    return [engine, "exec", *streams, *environment, f"--workdir={plan.where}", own[0], *command]
