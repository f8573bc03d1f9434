"""Prints the plan: what would run, and who decided what."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dray import engines
from dray.planning.schema import Bind, Plan, Variable
from dray.render.node import quoted, srun_options, start_argv

Row = tuple[str, str]


def text(plan: Plan) -> str:
    """The whole plan as text, as `dray plan -v` prints it."""
    return "\n".join("\n".join([title, *_table(rows, "  "), ""]) for title, rows in _sections(plan))


def _sections(plan: Plan) -> Iterator[tuple[str, list[Row]]]:
    yield (
        "run",
        [
            ("id", plan.run),
            ("folder", f"{plan.run_folder}, attempt {plan.attempt}"),
            *_reasons(plan, "access"),
            ("recipe", _recipe(plan)),
            ("image", _image(plan)),
            *_reasons(plan, "stage"),
            ("signed", f"with one of {' '.join(plan.signers)}: each node checks" if plan.signers else ""),
        ],
    )
    yield (
        "world",
        [
            *_reasons(plan, "site", "nodes"),
            (
                "",
                " ".join(
                    node.name if node.name == node.address else f"{node.name} ({node.address})"
                    for node in plan.world.nodes
                ),
            ),
            ("ranks", _ranks(plan)),
            ("GPUs", plan.reasons.get("gpus", "")),
            *_reasons(plan, "master", "port", "cores", "batch", "training", "attention", "compile", "hub"),
            *_reasons(plan, "preflight", "grace", "hang"),
        ],
    )
    if plan.fabric.kind != "unknown":
        yield "fabric", _fabric(plan)
    yield "environment", [(variable.name, _variable(variable)) for variable in plan.env]
    yield (
        "variables of the job",
        [
            ("passed", " ".join(plan.pass_env) or "none (pass_env in the recipe names them)"),
            ("Slurm's task", " ".join(plan.world.task)),
            ("left out", " ".join(plan.left_outside)),
        ],
    )
    if engines.get(plan.engine).image == "python":
        yield "binds", [("none", "bare runs on the machine itself")]
    else:
        yield "binds", [(bind.path, _bind(bind)) for bind in plan.binds]
    if plan.annotations:
        yield "annotations", [*plan.annotations.items()]
    if options := srun_options(plan):
        yield "srun", _lines(options)
    yield "on each node", [("", " ".join(map(quoted, start_argv(plan))))]
    yield "which starts", [("in", plan.where), ("", shlex.join([*plan.launcher, *plan.command]))]
    estimate, _, figures = plan.reasons.get("memory", "").partition("\n")
    if estimate:
        yield f"memory: {estimate}", _lines(figures)
    if plan.findings:
        yield "findings", _lines("\n".join(finding.line() for finding in plan.findings))


def summary(plan: Plan) -> str:
    """The plan's most important lines, and its findings."""
    command = plan.recipe.command
    rows = [
        ("recipe", _recipe(plan)),
        *_reasons(plan, "site"),
        ("image", _image(plan)),
        *_reasons(plan, "nodes"),
        ("ranks", _ranks(plan)),
        *_reasons(plan, "batch", "training"),
        ("memory", " ".join(plan.reasons.get("memory", "").replace("\n", "; ", 1).split())),
        ("command", f"{shlex.join(command.argv)} in {plan.where}" if command else ""),
        ("launcher", f"{plan.recipe.launcher}, in {plan.engine}"),
        ("folder", plan.run_folder),
    ]
    return "\n".join([*_table(rows), *(finding.line() for finding in plan.findings)]) + "\n"


def _reasons(plan: Plan, *names: str) -> list[Row]:
    """The choices of the plan with their reasons."""
    return [(name, plan.reasons.get(name, "")) for name in names]


def _lines(text: str) -> list[Row]:
    return [("", line) for line in text.splitlines()]


def _recipe(plan: Plan) -> str:
    return f"{plan.recipe.name}: {plan.recipe.about}".removesuffix(": ")


def _image(plan: Plan) -> str:
    return f"{plan.image} ({plan.reasons['image']}; started by {plan.engine})"


def _ranks(plan: Plan) -> str:
    return f"{plan.world.size} in all; on each node {plan.reasons['ranks_per_node']}"


def _fabric(plan: Plan) -> list[Row]:
    fabric = plan.fabric
    whose = {"host": "the host's libraries", "image": "the image's libraries", "none": "nothing is added"}
    least = fabric.min_bus_bandwidth_gb_s
    proof = " or ".join(fabric.transport) or "any transport"
    bandwidth = f", at {least} GB/s or more" if least else ""
    checked = plan.preflight and len(plan.world.nodes) > 1
    return [
        ("kind", f"{fabric.kind}, {whose[fabric.strategy]}: {' '.join(plan.reasons['fabric'].split())}"),
        *(("library", pattern) for pattern in fabric.libraries),
        ("plugin", fabric.plugin),
        ("check", f"the preflight requires {proof} between nodes{bandwidth}" if checked else ""),
    ]


def _bind(bind: Bind) -> str:
    mode = "read-write" if bind.write else "read-only"
    return f"{mode}{'' if bind.required else ' if it exists'}, {bind.origin}"


def _variable(variable: Variable) -> str:
    shown = f"{variable.value or repr(variable.value)}  [{variable.source}]"
    if variable.why:
        shown += f" {variable.why}"
    if variable.beats:
        shown += f"; replaces {', '.join(variable.beats)}"
    return shown


def _table(rows: list[Row], indent: str = "") -> list[str]:
    rows = [row for row in rows if row[1]]
    width = max((len(name) for name, _ in rows), default=0)
    gap = "  " if width else ""
    return [f"{indent}{name:<{width}}{gap}{value}".rstrip() for name, value in rows]
