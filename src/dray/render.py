"""Plan -> text: the node script, the sbatch options, what `dray plan` shows. Quoting happens here, nowhere else."""

from __future__ import annotations

import json
import shlex

from dray import engines
from dray.binds import Bind
from dray.engines.words import OnNode, Word
from dray.errors import EXIT_UNFIT
from dray.plan import Plan
from dray.spec.recipe import Recipe
from dray.spec.site import Site

# The record is what the runner would write, had the container started.
_NEED = """\
need() {{ # PLACE WHY RECORD
  [[ -e "$1" ]] && return
  local -r node="${{{name}:-$(</proc/sys/kernel/hostname)}}"
  printf 'dray: %s is not there\\n  wanted: %s\\n  where:  node %s\\n' "$1" "$2" "$node" >&2
  printf '{{"time": %s, "node": "%s", %s}}\\n' "$(date +%s.%N)" "$node" "$3" >"failures/node-${{{node}:-unknown}}.json"
  exit {code}
}}
cd {folder} || exit {code}"""


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
    if engine.prefix:
        lines += ["", "# Who this node is: known only here, so handed in as it is."]
        lines += [
            f'if [[ -v {name} ]]; then export {engine.prefix}{name}="${name}"; fi'
            for name in plan.world.identity.values()
        ]
    if plan.engine != "bare":
        names = plan.world.identity
        lines += ["", "# An engine's own words about a missing place are hard to read."]
        lines += [_NEED.format(**names, code=EXIT_UNFIT, folder=shlex.quote(plan.folder))]
        lines += [_need(bind) for bind in plan.binds if bind.path != plan.folder]
    lines += ["", "exec " + " \\\n  ".join(_word(word) for word in _start(plan)), ""]
    return "\n".join(lines)


def _need(bind: Bind) -> str:
    wanted = f"{bind.source}: {bind.why}"
    record: dict[str, object] = {
        "rank": None,
        "code": EXIT_UNFIT,
        "why": f"{bind.path} is not there\n  wanted: {wanted}",
        "log": None,
        "last_lines": [],
    }
    return shlex.join(["need", bind.path, wanted, json.dumps(record)[1:-1]])


def _comment(text: str) -> str:
    # A site's words may hold a line break, and what follows it would be a command.
    return "# " + " ".join(text.split())


def _word(word: Word) -> str:
    if isinstance(word, OnNode):
        return f'{word.option}="${word.variable}"'
    return shlex.quote(word)


def sbatch_options(recipe: Recipe, site: Site) -> list[str]:
    """What `dray submit` adds to sbatch; a later option of the user's wins over these."""
    return [f"--job-name={recipe.name}", f"--nodes={recipe.nodes}", "--ntasks-per-node=1", *site.sbatch]


def text(plan: Plan) -> str:
    """The plan for a reader: what would run, and who decided what."""
    rows: list[tuple[str, list[tuple[str, str]]]] = [
        (
            "run",
            [
                ("id", plan.run),
                ("folder", plan.folder),
                ("recipe", f"{plan.recipe.name}" + (f": {plan.recipe.about}" if plan.recipe.about else "")),
                ("image", f"{plan.image} ({plan.variant}, started by {plan.engine})"),
            ],
        ),
        (
            "world",
            [
                ("nodes", plan.reasons["nodes"]),
                ("", " ".join(_named(node.name, node.address) for node in plan.world.nodes)),
                ("ranks", f"{plan.world.size} in all; on a node {plan.reasons['ranks_per_node']}"),
                ("master", plan.reasons["master"]),
                ("port", plan.reasons["port"]),
                ("batch", plan.reasons["batch"]),
            ],
        ),
        ("environment", [(v.name, _origin(v.value, v.source, v.why, v.beats)) for v in plan.env]),
        (
            "binds",
            [(b.path, f"{'read-write' if b.write else 'read-only'}, {b.source}: {b.why}") for b in plan.binds]
            if plan.engine != "bare"
            else [("none", "bare runs on the machine itself")],
        ),
        ("on each node", [("", " ".join(_word(word) for word in _start(plan)))]),
        ("which starts", [("", shlex.join([*plan.launcher, *plan.command]))]),
    ]
    return "\n".join(_section(title, entries) for title, entries in rows)


def _start(plan: Plan) -> list[Word]:
    python = plan.image if plan.engine == "bare" else "python3"
    return engines.of(plan).argv(plan, [python, "-m", "dray.runner", f"{plan.folder}/plan.json"])


def _named(name: str, address: str) -> str:
    return name if name == address else f"{name} ({address})"


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
