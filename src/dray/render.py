"""Plan -> text: the node script, the sbatch options, what `dray plan` shows. Quoting happens here, nowhere else."""

from __future__ import annotations

import shlex

from dray import engines
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import run_folder as names
from dray.engines import places, pyxis, stage
from dray.engines.docker import DEVICES
from dray.engines.words import OnNode
from dray.planning import environment
from dray.planning.plan import Plan

_START = """\
# What was compiled on this node goes when it has ended.
readonly scratch={scratch}
trap '{unstage}rm -rf -- "$scratch"' EXIT
# The engine has a group of its own: what this script hears (Slurm may signal it alone), it hands on, and once.
set -m
{start} &
set +m
readonly engine=$!
for heard in TERM INT HUP USR1; do
  # shellcheck disable=SC2064 # now, not then
  trap "kill -$heard -- -$engine 2>/dev/null" "$heard"
done
while :; do # a signal ends the wait, and not the engine
  code=0
  wait "$engine" || code=$?
  kill -0 "$engine" 2>/dev/null || break
done
wait "$engine" || code=$?
exit "$code"
"""
_DEVICES = f"""\
# The fabric's devices, where this node has them.
{DEVICES}=()
for device in /dev/infiniband /dev/cxi*; do
  [[ ! -e "$device" ]] || {DEVICES}+=("--device=$device")
done"""


def node_script(plan: Plan) -> str:
    """The script that one task on each node runs."""
    engine = engines.of(plan)
    lines = [
        "#!/usr/bin/env bash",
        f"# Starts run {plan.run} on one node. dray {plan.dray} rendered it from plan.json: change the recipe, not it.",
        "set -euo pipefail",
        "",
    ]
    if engine.prefix:
        lines += [
            "# The engine would hand these in as well, and no plan would show them.",
            'unset "${!APPTAINERENV_@}" "${!SINGULARITYENV_@}"',
            "unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAINLIBS}",
            "",
        ]
    for variable in plan.env:
        lines.append(_comment(variable.source + (f": {variable.why}" if variable.why else "")))
        lines.append(f"export {engine.prefix}{variable.name}={shlex.quote(variable.value)}")
    identity = plan.world.identity
    if plan.engine not in ("bare", "pyxis"):
        lines += ["", *places.script(plan)]
    if engine.identify:
        known = " ".join(map(_word, engine.identify(plan)))
        lines += ["", "# Which image this node has: the first node holds it against its own."]
        lines += [f"{identity['image']}=$({known} | tr --delete ' \\n') || true", f"export {identity['image']}"]
    if engine.prefix:
        lines += [
            "",
            "# Known only here, so handed in as it is: who this node is, and what pass_env names.",
        ]
        lines += [
            f'if [[ -v {name} ]]; then export {engine.prefix}{name}="${name}"; fi'
            for name in (*identity.values(), *plan.pass_env)
        ]
    if plan.recipe.pass_env:
        lines += ["", "# A token that is missing says so here, and not as a failed download."]
        lines += [f"[[ -v {name} ]] || echo 'dray: {name} (pass_env) is not set' >&2" for name in plan.recipe.pass_env]
    if plan.engine in ("docker", "podman"):
        lines += ["", _DEVICES]
    if plan.stage:
        lines += ["", stage.script(plan)]
    lines += ["", f"cd {shlex.quote(plan.where)}"] if plan.engine in ("bare", "pyxis") else []
    start = " \\\n  ".join(_word(word) for word in _start(plan))
    if not plan.by_slurm:  # dray run waits for the nodes, and cleans up after them
        return "\n".join([*lines, "", f"exec {start}", ""])
    words = {"scratch": shlex.quote(environment.scratch(plan.run)), "unstage": "unstage; " if plan.stage else ""}
    return "\n".join([*lines, "", _START.format(**words, start=start)])


def _comment(text: str) -> str:
    # A site's words may hold a line break, and what follows it would be a command.
    return "# " + " ".join(text.split())


def _word(word: str) -> str:
    return word if isinstance(word, OnNode) else shlex.quote(word)


def srun_options(plan: Plan) -> str:
    """What the job's script adds to srun where Slurm starts the container, a word a line."""
    return "".join(f"{word}\n" for word in pyxis.srun(plan))


def sbatch_options(recipe: Recipe, site: Site, gpus: int) -> list[str]:
    """What `dray submit` adds to sbatch; a later option of the user's wins over these."""
    asked = {"gpus-per-node": f"--gpus-per-node={gpus}", "gres": f"--gres=gpu:{gpus}"}
    options = [f"--job-name={recipe.name}", f"--nodes={recipe.nodes}", "--ntasks-per-node=1", *site.sbatch]
    return [*options, asked[site.gpu_option]] if gpus else options


def text(plan: Plan) -> str:
    """The plan for a reader: what would run, and who decided what."""
    rows: list[tuple[str, list[tuple[str, str]]]] = [
        (
            "run",
            [
                ("id", plan.run),
                ("folder", f"{plan.run_folder}, attempt {plan.attempt}"),
                ("recipe", f"{plan.recipe.name}" + (f": {plan.recipe.about}" if plan.recipe.about else "")),
                ("image", f"{plan.image} ({plan.variant}, started by {plan.engine})"),
            ],
        ),
        (
            "world",
            [
                ("site", plan.reasons["site"]),
                ("nodes", plan.reasons["nodes"]),
                ("", " ".join(_named(node.name, node.address) for node in plan.world.nodes)),
                ("ranks", f"{plan.world.size} in all; on a node {plan.reasons['ranks_per_node']}"),
                ("master", plan.reasons["master"]),
                ("port", plan.reasons["port"]),
                ("cores", plan.reasons["cores"]),
                *([("batch", plan.reasons["batch"])] if plan.batch else []),
                *([("training", plan.reasons["training"])] if plan.recipe.train else []),
                ("preflight", plan.reasons["preflight"]),
            ],
        ),
        *([("fabric", _fabric(plan))] if plan.fabric.kind != "unknown" else []),
        ("environment", [(v.name, _origin(v.value, v.source, v.why, v.beats)) for v in plan.env]),
        (
            "from where the job was submitted",
            [
                ("passed", " ".join(plan.pass_env) or "nothing (pass_env in the recipe names what should be)"),
                *([("left outside", " ".join(plan.left_outside))] if plan.left_outside else []),
            ],
        ),
        (
            "binds",
            [
                (
                    b.path,
                    f"{'read-write' if b.write else 'read-only'}{'' if b.required else ' if it is there'}, {b.origin}",
                )
                for b in plan.binds
            ]
            if plan.engine != "bare"
            else [("none", "bare runs on the machine itself")],
        ),
        ("on each node", [("", " ".join(_word(word) for word in _start(plan)))]),
        ("which starts", [("in", plan.where), ("", shlex.join([*plan.launcher, *plan.command]))]),
    ]
    return "\n".join(_section(title, entries) for title, entries in rows)


def _start(plan: Plan) -> list[str]:
    python = plan.image if plan.engine == "bare" else "python3"
    return engines.of(plan).argv(plan, [python, "-m", "dray.runner", f"{plan.folder}/{names.PLAN}"])


def _named(name: str, address: str) -> str:
    return name if name == address else f"{name} ({address})"


def _fabric(plan: Plan) -> list[tuple[str, str]]:
    fabric = plan.fabric
    whose = {"host": "the host's libraries", "image": "the image's libraries", "none": "nothing is put in"}
    proof = " or ".join(fabric.transport) or "anything"
    return [
        ("kind", f"{fabric.kind}, {whose[fabric.strategy]}: {' '.join(plan.reasons['fabric'].split())}"),
        *(("library", pattern) for pattern in fabric.libraries),
        *([("plugin", fabric.plugin)] if fabric.plugin else []),
        (
            "proof",
            f"ranks of several nodes must use {proof}"
            + (f", at {fabric.min_bus_bandwidth_gb_s} GB/s or more" if fabric.min_bus_bandwidth_gb_s else ""),
        ),
    ]


def _origin(value: str, source: str, why: str, beats: tuple[str, ...]) -> str:
    shown = f"{value or repr(value)}  [{source}]"
    if why:
        shown += f" {why}"
    if beats:
        shown += f"; beats {', '.join(beats)}"
    return shown


def _section(title: str, entries: list[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in entries), default=0)
    lines = [f"  {name:<{width}}  {value}".rstrip() if width else f"  {value}" for name, value in entries]
    return "\n".join([title, *lines, ""])
