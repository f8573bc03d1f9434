"""The script that starts a node: the plan's data, and the files of bash that use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from importlib import resources

from dray import engines
from dray.config.image_definition import ACCELERATORS
from dray.contract import exit_codes, heartbeat, node_start
from dray.contract import run_folder as names
from dray.contract.node_start import is_early
from dray.engines.base import STAGED_IMAGE, Container, Engine, Mount, Shell
from dray.planning.schema import Plan, Variable

_DEVICES = """\
# The fabric's devices, where this node has them.
devices=()
for device in /dev/infiniband /dev/cxi*; do
  [[ ! -e "$device" ]] || devices+=("--device=$device")
done"""

_MKDIR = """\
# shellcheck disable=SC2174 # the folders above it keep the usual mode
mkdir -p -m"""

_SHARED = """\
# The recipe shares the run with the group: runs.share = "group".
umask g=rx"""

_UNSET = """\
# The engine would pass these on too, and no plan would show them.
unset "${!APPTAINERENV_@}" "${!SINGULARITYENV_@}"
unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAINLIBS}"""


def node_script(plan: Plan, *, entering: bool = False) -> str:
    """The script that one task on each node runs."""
    return "\n\n".join(filter(None, _parts(plan, entering=entering))) + "\n"


def enter_script(plan: Plan) -> str:
    """A script for a node of a running run: it starts its arguments in a container like that of the run."""
    # The copy on the node's disk is the run's, which takes it away.
    return node_script(plan.model_copy(update={"stage": ""}), entering=True)


def _parts(plan: Plan, *, entering: bool) -> Iterator[str]:
    engine = engines.get(plan.engine)
    prefix = engine.env_prefix
    yield (
        "#!/usr/bin/env bash\n"
        f"# Run {plan.run} on one node. dray {plan.dray} wrote it from plan.json: change the recipe instead.\n"
        "set -euo pipefail"
    )
    if plan.recipe.runs.share == "group":
        yield _SHARED
    if not entering:
        yield _file("start_times")
    if prefix:
        yield _UNSET
    exports = [
        f"export {prefix}{variable.name}={shlex.quote(variable.value)}"
        for variable in _exported(plan, entering=entering)
    ]
    yield "\n".join(["# plan.json says who has set them, and why.", *exports])
    if entering:
        yield _file("enter")
    elif plan.by_slurm:  # dray run waits for the nodes, and cleans up after them
        yield f"scratch={shlex.quote(plan.scratch)} copy={shlex.quote(plan.stage)}\n{_file('start')}"
    # The recipe's folders outside of the run folder are as private as that one.
    mode = names.MODES[plan.recipe.runs.share]
    yield "\n".join(f"{_MKDIR} {mode:o} -- {shlex.quote(bind.path)} || true" for bind in plan.binds if bind.made)
    if engine.script_mounts:
        yield "\n".join(_places(plan, entering=entering))
    yield from _engine_parts(plan, engine, entering=entering)


def _engine_parts(plan: Plan, engine: Engine, *, entering: bool) -> Iterator[str]:
    """What the engine needs, and its start."""
    prefix = engine.env_prefix
    if identify := engine.identify(plan.image):
        variable = plan.world.identity["image"]
        yield (
            "# Which image this node has: the first node compares it with its own.\n"
            f"{variable}=$({shlex.join(identify)} | tr --delete ' \\n') || true\n"
            f"export {variable}"
        )
    if prefix:
        yield _handed_in(plan, prefix)
    if plan.recipe.pass_env:
        yield _missing_secrets(plan.recipe.pass_env)
    if engine.names_devices:
        yield _DEVICES
    if devices := engine.devices.get(ACCELERATORS[plan.variant]):
        yield f"{_file(devices)}\n\nnode::{devices} {plan.engine}"
    if plan.stage:
        call = shlex.join(["node::stage", plan.image, plan.stage, plan.image_sha256])
        yield f"node::now staging\n\n{_file('stage')}\n\n{call}\n\nnode::now staged"
    if plan.signers:
        yield "\n\n".join(_signed(plan))
    if not entering:
        yield f'export {prefix}{node_start.STARTED}="$started" {prefix}{heartbeat.FOLDER}={shlex.quote(plan.scratch)}'
    if not engine.script_mounts:
        yield f"cd {shlex.quote(plan.where)}"
    argv = engine.argv(_container(plan, entering=True), [Shell('"$@"')]) if entering else start_argv(plan)
    start = "node::start" if entering or plan.by_slurm else "exec"
    yield f"{start} " + " \\\n  ".join(map(quoted, argv))


def srun_options(plan: Plan) -> str:
    """Options for the job's srun, one per line: if Slurm starts the container, or the run may go on without a node."""
    options = engine_options(plan)
    if plan.recipe.replaces_nodes and plan.world.shared_folder and not plan.world.one_machine:
        nodes = [node.name for node in plan.world.nodes]
        options += [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", f"--nodelist={','.join(nodes)}", "--no-kill"]
    return "".join(f"{option}\n" for option in options)


def engine_options(plan: Plan) -> list[str]:
    """The options of srun, if Slurm itself starts the container."""
    return engines.get(plan.engine).srun_options(_container(plan))


def engine_files(plan: Plan) -> dict[str, str]:
    """The files that the engine reads in the attempt's folder."""
    return engines.get(plan.engine).files(_container(plan))


def start_argv(plan: Plan) -> list[str]:
    """The engine's whole command line."""
    engine = engines.get(plan.engine)
    inner = [engine.python(plan.image), "-m", "dray.runner", f"{plan.folder}/{names.PLAN}"]
    return engine.argv(_container(plan), inner)


def _container(plan: Plan, *, entering: bool = False) -> Container:
    engine, kind = engines.get(plan.engine), plan.fabric.kind
    brings = kind == "slingshot" and plan.variant in engine.slingshot and len(plan.world.nodes) > 1
    return Container(
        run=plan.run,
        image=STAGED_IMAGE if plan.stage else plan.image,
        accelerator=ACCELERATORS[plan.variant],
        annotations=plan.annotations,
        layer=plan.layer.file if plan.layer else "",
        fabric=kind if brings else "",
        folder=plan.where if engine.script_mounts else plan.folder,  # in which node.sh itself begins
        user=plan.user,
        home=plan.recipe.command is not None,
        variables=(
            *(variable.name for variable in _exported(plan, entering=entering)),
            *plan.world.identity.values(),
            *(node_start.STARTED, heartbeat.FOLDER),
            *plan.world.task,
            *plan.pass_env,
        ),
        name_variable=plan.world.identity["name"],
        one_machine=plan.world.one_machine,
        terminal=entering,
        mounts=tuple(Mount(bind.path, bind.write) for bind in plan.binds if bind.required),
    )


def _file(name: str) -> str:
    """A file of bash without its first line, which node.sh has already."""
    content = resources.files("dray.render").joinpath("bash", f"{name}.sh").read_text(encoding="utf-8")
    return content.partition("\n")[2].rstrip("\n")


def _exported(plan: Plan, *, entering: bool) -> list[Variable]:
    """The variables that the script sets. The runner sets the others; a shell that enters has no runner."""
    return [variable for variable in plan.env if entering or is_early(variable.name)]


def _places(plan: Plan, *, entering: bool) -> Iterator[str]:
    engine, identity = engines.get(plan.engine), plan.world.identity
    yield f"number={identity['node']} name={identity['name']} read_only={engine.read_only}"
    yield _file("mounts")
    if entering:
        yield f"\nnode::record() {{ exit {exit_codes.UNFIT}; }} # nothing of the run has failed"
    yield f"\ncd {shlex.quote(plan.folder)} || exit {exit_codes.UNFIT}"
    if engine.image == "file":
        yield _need("need", plan.image, "the image")
    if plan.image_file:
        why = _why(f"{plan.image} was changed since it was adopted", plan.image_file)
        yield shlex.join(["node::same", plan.image, plan.image_file, why])
    if plan.layer:
        yield _need("need", plan.layer.file, "the layer")
    for bind in plan.binds:
        call = shlex.join(["node::bind", bind.path, "rw" if bind.write else "ro"])
        if bind.required and bind.path != plan.run_folder:
            yield _need("need", bind.path, f"{bind.source}: {bind.why}")
        yield call if bind.required else f"[[ ! -e {shlex.quote(bind.path)} ]] || {call}"
    if plan.fabric.strategy == "host":
        yield from _fabric(plan)
    yield "node::mounts"


def _fabric(plan: Plan) -> Iterator[str]:
    wanted = f"a part of the fabric ({plan.site}), without which ranks silently use TCP"
    yield f"\n{_file('fabric')}\n"
    for pattern in plan.fabric.libraries:
        yield _need("library", pattern, wanted)
    if plan.fabric.host_plugin:
        yield _need("newest", plan.fabric.host_plugin, wanted)
        yield 'node::bind "$newest" ro'
        if "NCCL_NET_PLUGIN" not in {variable.name for variable in plan.env}:  # the recipe's, or the site's own
            yield f'export {engines.get(plan.engine).env_prefix}NCCL_NET_PLUGIN="$newest"'


def _need(function: str, path: str, wanted: str) -> str:
    return shlex.join([f"node::{function}", path, wanted, _why(f"{path} does not exist", wanted)])


def _why(problem: str, wanted: str) -> str:
    """The reason in the record of a node that is unfit, as JSON."""
    return json.dumps(f"{problem}\n  wanted: {wanted}")


def _handed_in(plan: Plan, prefix: str) -> str:
    names = " ".join((*plan.world.identity.values(), *plan.world.task, *plan.pass_env))
    return f"""\
# Only the node knows these: its own identity, Slurm's task, and what pass_env names.
# Where bash traces (SHELLOPTS=xtrace), the log would show the values.
{{ traced=$-; set +x; }} 2>/dev/null
for variable in {names}; do
  [[ ! -v "$variable" ]] || export "{prefix}$variable=${{!variable}}"
done
[[ "$traced" != *x* ]] || set -x"""


def _missing_secrets(pass_env: tuple[str, ...]) -> str:
    return f"""\
# Name a missing token now, and not after a failed download.
for variable in {" ".join(pass_env)}; do
  [[ -v "$variable" ]] || echo "dray: $variable (pass_env) is not set" >&2
done"""


def _signed(plan: Plan) -> Iterator[str]:
    """Check the file that the node starts, which is its own copy if there is one; and the layer."""
    yield _file("signed")
    files: dict[str, str] = {"image": STAGED_IMAGE if plan.stage else plan.image}
    if plan.layer:
        files["layer"] = plan.layer.file
    for what, file in files.items():
        why = _why(f"the {what} lacks the required signature", f"a signature with one of {' '.join(plan.signers)}")
        yield " ".join(map(quoted, ["node::signed", plan.engine, what, file, why, *plan.signers]))


def quoted(argument: str) -> str:
    """The argument as a word of bash."""
    return argument if isinstance(argument, Shell) else shlex.quote(argument)
