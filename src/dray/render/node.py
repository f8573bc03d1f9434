"""The script that starts a node: the plan's data, and the files of bash that use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from importlib import resources

from dray import engines
from dray.config.image import ACCELERATORS
from dray.contract import exit_codes, startup
from dray.contract import run_folder as names
from dray.engines.base import STAGED_IMAGE, Container, Engine, Mount, Shell
from dray.planning.schema import Bind, Plan

_DEVICES = """\
# The fabric's devices, where this node has them.
devices=()
for device in /dev/infiniband /dev/cxi*; do
  [[ ! -e "$device" ]] || devices+=("--device=$device")
done"""

_SHARED = """\
# The recipe shares the run with the group: runs.share = "group".
umask g=rx"""


def node_script(plan: Plan) -> str:
    """The script that one task on each node runs."""
    if not plan.by_slurm:  # dray run waits for the nodes, and cleans up after them
        return _script(plan, "Starts", "", ["exec", *start_argv(plan)])
    own = f"scratch={_quoted(plan.scratch)} copy={_quoted(plan.stage)}\n{_file('start')}"
    return _script(plan, "Starts", own, ["node::start", *start_argv(plan)])


def enter_script(plan: Plan) -> str:
    """A script for a node of a running run: it starts its arguments in a container like that of the run."""
    plan = plan.model_copy(update={"stage": ""})  # the copy on the node's disk is the run's, which takes it away
    argv = engines.get(plan.engine).argv(_container(plan, terminal=True), [Shell('"$@"')])
    return _script(plan, "Enters", _file("enter"), ["node::start", *argv], entering=True)


def _script(plan: Plan, does: str, own: str, argv: list[str], *, entering: bool = False) -> str:
    engine = engines.get(plan.engine)
    first, *rest = argv
    start = f"{first} " + " \\\n  ".join(map(_quoted, rest))
    parts = [
        _head(plan, does),
        _SHARED if plan.recipe.runs.share == "group" else "",
        "" if entering else _file("clock"),
        _unset() if engine.env_prefix else "",
        *_lines(_exports(plan, engine.env_prefix)),
        own,
        *_lines(_made(plan)),
        *_lines(_places(plan, entering=entering) if engine.script_mounts else []),
        *_lines(_identify(plan, engine.identify(plan.image))),
        *_lines(_handed_in(plan, engine.env_prefix) if engine.env_prefix else []),
        *_lines(_missing_secrets(plan)),
        _DEVICES if engine.names_devices else "",
        _devices(plan, engine),
        _stage(plan) if plan.stage else "",
        _signed(plan) if plan.signers else "",
        "" if entering else f'export {engine.env_prefix}{startup.VARIABLE}="$started"',
        f"cd {_quoted(plan.where)}" if not engine.script_mounts else "",
        start,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _head(plan: Plan, does: str) -> str:
    return (
        "#!/usr/bin/env bash\n"
        f"# {does} run {plan.run} on one node. dray {plan.dray} wrote it from plan.json: change the recipe instead.\n"
        "set -euo pipefail"
    )


def srun_options(plan: Plan) -> str:
    """Options for the job's srun, one per line: if Slurm starts the container, or the run may go on without a node."""
    options = engine_options(plan)
    if plan.recipe.replaces_nodes and plan.world.shared_folder and not plan.world.one_machine:
        names = [node.name for node in plan.world.nodes]
        options += [f"--nodes={len(names)}", f"--ntasks={len(names)}", f"--nodelist={','.join(names)}", "--no-kill"]
    return "".join(f"{option}\n" for option in options)


def engine_options(plan: Plan) -> list[str]:
    """The options of srun, if Slurm itself starts the container."""
    return [*engines.get(plan.engine).srun_options(_container(plan))]


def engine_files(plan: Plan) -> dict[str, str]:
    """The files that the engine reads in the attempt's folder."""
    return engines.get(plan.engine).files(_container(plan))


def start_argv(plan: Plan) -> list[str]:
    """The engine's whole command line."""
    engine = engines.get(plan.engine)
    inner = [engine.python(plan.image), "-m", "dray.runner", f"{plan.folder}/{names.PLAN}"]
    return engine.argv(_container(plan), inner)


def _container(plan: Plan, *, terminal: bool = False) -> Container:
    engine, kind = engines.get(plan.engine), plan.fabric.kind
    inside = not engine.script_mounts  # node.sh is in the container already
    brings = kind == "slingshot" and plan.variant in engine.slingshot and len(plan.world.nodes) > 1
    return Container(
        run=plan.run,
        image=STAGED_IMAGE if plan.stage else plan.image,
        accelerator=ACCELERATORS[plan.variant],
        annotations=plan.annotations,
        layer=plan.layer.file if plan.layer else "",
        fabric=kind if brings else "",
        folder=plan.folder if inside else plan.where,
        user=plan.user,
        home=plan.recipe.command is not None,
        variables=(
            *(variable.name for variable in plan.env),
            *plan.world.identity.values(),
            startup.VARIABLE,
            *plan.world.task,
            *plan.pass_env,
        ),
        name_variable=plan.world.identity["name"],
        one_machine=plan.world.one_machine,
        terminal=terminal,
        mounts=tuple(Mount(bind.path, bind.write) for bind in plan.binds if bind.required),
    )


def _file(name: str) -> str:
    """A file of bash without its first line, which node.sh has already."""
    content = resources.files("dray.render").joinpath("bash", f"{name}.sh").read_text(encoding="utf-8")
    return content.partition("\n")[2].rstrip("\n")


def _devices(plan: Plan, engine: Engine) -> str:
    file = engine.devices.get(ACCELERATORS[plan.variant], "")
    return f"{_file(file)}\n\nnode::{file} {plan.engine}" if file else ""


def _lines(lines: Iterator[str] | list[str]) -> list[str]:
    joined = "\n".join(lines)
    return [joined] if joined else []


def _unset() -> str:
    return (
        "# The engine would pass these on too, and no plan would show them.\n"
        'unset "${!APPTAINERENV_@}" "${!SINGULARITYENV_@}"\n'
        "unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAINLIBS}"
    )


def _exports(plan: Plan, prefix: str) -> Iterator[str]:
    for variable in plan.env:
        # A site's text may hold a line break, and what follows it would be a command.
        yield "# " + " ".join((variable.source + (f": {variable.why}" if variable.why else "")).split())
        yield f"export {prefix}{variable.name}={_quoted(variable.value)}"


def _places(plan: Plan, *, entering: bool) -> Iterator[str]:
    engine, identity = engines.get(plan.engine), plan.world.identity
    yield f"number={identity['node']} name={identity['name']} read_only={engine.read_only}"
    yield _file("places")
    if entering:
        yield f"\nnode::record() {{ exit {exit_codes.UNFIT}; }} # nothing of the run has failed"
    yield f"\n{_file('mount')}\n"
    yield f"cd {_quoted(plan.folder)} || exit {exit_codes.UNFIT}"
    if engine.image == "file":
        yield _call("need", plan.image, "the image")
    if plan.image_file:
        yield f"\n{_file('same')}\n"
        yield _same(plan)
    if plan.layer:
        yield _call("need", plan.layer.file, "the layer")
    for bind in plan.binds:
        yield from _bind(bind, plan)
    if plan.fabric.strategy == "host":
        yield from _fabric(plan)
    yield "node::mounts"


def _made(plan: Plan) -> Iterator[str]:
    """Create the recipe's folders outside of the run folder, as private as that one."""
    for bind in plan.binds:
        if bind.made:
            yield "# shellcheck disable=SC2174 # the folders above it keep the usual mode"
            yield f"mkdir -p -m {names.MODES[plan.recipe.runs.share]:o} -- {_quoted(bind.path)} || true"


def _bind(bind: Bind, plan: Plan) -> Iterator[str]:
    path, mode = _quoted(bind.path), "rw" if bind.write else "ro"
    if not bind.required:
        yield f"[[ ! -e {path} ]] || node::bind {path} {mode}"
        return
    if bind.path != plan.run_folder:
        yield _call("need", bind.path, f"{bind.source}: {bind.why}")
    yield f"node::bind {path} {mode}"


def _fabric(plan: Plan) -> Iterator[str]:
    wanted = f"a part of the fabric ({plan.site}), without which ranks silently use TCP"
    yield f"\n{_file('fabric')}\n"
    for pattern in plan.fabric.libraries:
        yield _call("library", pattern, wanted)
    if plan.fabric.host_plugin:
        yield _call("newest", plan.fabric.host_plugin, wanted)
        yield 'node::bind "$newest" ro'
        if "NCCL_NET_PLUGIN" not in {variable.name for variable in plan.env}:  # the recipe's, or the site's own
            yield f'export {engines.get(plan.engine).env_prefix}NCCL_NET_PLUGIN="$newest"'


def _call(function: str, path: str, wanted: str) -> str:
    record: dict[str, object] = {
        "rank": None,
        "code": exit_codes.UNFIT,
        "why": f"{path} does not exist\n  wanted: {wanted}",
        "log": None,
        "last_lines": [],
    }
    return shlex.join([f"node::{function}", path, wanted, json.dumps(record)[1:-1]])


def _same(plan: Plan) -> str:
    why = f"{plan.image} was changed since it was adopted\n  wanted: {plan.image_file}"
    record: dict[str, object] = {
        "rank": None,
        "code": exit_codes.UNFIT,
        "why": why,
        "log": None,
        "last_lines": [],
    }
    return shlex.join(["node::same", plan.image, plan.image_file, json.dumps(record)[1:-1]])


def _identify(plan: Plan, argv: list[str]) -> Iterator[str]:
    if argv:
        variable = plan.world.identity["image"]
        yield "# Which image this node has: the first node compares it with its own."
        yield f"{variable}=$({' '.join(map(_quoted, argv))} | tr --delete ' \\n') || true"
        yield f"export {variable}"


def _handed_in(plan: Plan, prefix: str) -> Iterator[str]:
    yield "# Only the node knows these: its own identity, Slurm's task, and what pass_env names."
    yield "# Where bash traces (SHELLOPTS=xtrace), the log would show the values."
    yield "{ traced=$-; set +x; } 2>/dev/null"
    names = " ".join((*plan.world.identity.values(), *plan.world.task, *plan.pass_env))
    yield f"for variable in {names}; do"
    yield f'  [[ ! -v "$variable" ]] || export "{prefix}$variable=${{!variable}}"'
    yield "done"
    yield '[[ "$traced" != *x* ]] || set -x'


def _missing_secrets(plan: Plan) -> Iterator[str]:
    if plan.recipe.pass_env:
        yield "# Name a missing token now, and not after a failed download."
    for name in plan.recipe.pass_env:
        yield f"[[ -v {name} ]] || echo 'dray: {name} (pass_env) is not set' >&2"


def _stage(plan: Plan) -> str:
    call = shlex.join(["node::stage", plan.image, plan.stage, plan.image_sha256])
    return f"node::now staging\n\n{_file('stage')}\n\n{call}\n\nnode::now staged"


def _signed(plan: Plan) -> str:
    """Check the file that the node starts, which is its own copy if there is one; and the layer."""
    calls = [_file("signed")]
    files = {"image": plan.image, **({"layer": plan.layer.file} if plan.layer else {})}
    for what, file in files.items():
        record: dict[str, object] = {
            "rank": None,
            "code": exit_codes.UNFIT,
            "why": f"{file} lacks the required signature\n  wanted: a signature with one of {' '.join(plan.signers)}",
            "log": None,
            "last_lines": [],
        }
        starts = STAGED_IMAGE if plan.stage and what == "image" else file
        argv = ["node::signed", plan.engine, what, starts, json.dumps(record)[1:-1], *plan.signers]
        calls.append(" ".join(map(_quoted, argv)))
    return "\n\n".join(calls)


def _quoted(argument: str) -> str:
    return argument if isinstance(argument, Shell) else shlex.quote(argument)
