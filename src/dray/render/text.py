"""Prints the plan: what would run, and who decided what."""

from __future__ import annotations

import shlex

from dray import engines
from dray.engines.base import Shell
from dray.planning.schema import Plan
from dray.render.node import srun_options, start_argv

_TRAINING = ("training", "attention", "compile", "loss")
"""The reasons of the trainer's settings."""


def text(plan: Plan) -> str:
    """The whole plan as text, as `dray plan -v` prints it."""
    rows: list[tuple[str, list[tuple[str, str]]]] = [
        (
            "run",
            [
                ("id", plan.run),
                ("folder", f"{plan.run_folder}, attempt {plan.attempt}"),
                ("access", plan.reasons["access"]),
                ("recipe", f"{plan.recipe.name}" + (f": {plan.recipe.about}" if plan.recipe.about else "")),
                ("image", _image(plan)),
                *([("stage", plan.reasons["stage"])] if "stage" in plan.reasons else []),
                *([("signed", f"with one of {' '.join(plan.signers)}: each node checks")] if plan.signers else []),
            ],
        ),
        (
            "world",
            [
                ("site", plan.reasons["site"]),
                ("nodes", plan.reasons["nodes"]),
                ("", " ".join(_named(node.name, node.address) for node in plan.world.nodes)),
                ("ranks", f"{plan.world.size} in all; on each node {plan.reasons['ranks_per_node']}"),
                *([("GPUs", plan.reasons["gpus"])] if "gpus" in plan.reasons else []),
                ("master", plan.reasons["master"]),
                ("port", plan.reasons["port"]),
                ("cores", plan.reasons["cores"]),
                *([("batch", plan.reasons["batch"])] if plan.batch else []),
                *(
                    [(name, plan.reasons[name]) for name in ("training", "attention", "compile")]
                    if plan.recipe.train
                    else []
                ),
                *([("hub", plan.reasons["hub"])] if "hub" in plan.reasons else []),
                ("preflight", plan.reasons["preflight"]),
                *([("grace", plan.reasons["grace"])] if "grace" in plan.reasons else []),
                ("hang", plan.reasons["hang"]),
            ],
        ),
        *([("fabric", _fabric(plan))] if plan.fabric.kind != "unknown" else []),
        ("environment", [(v.name, _origin(v.value, v.source, v.why, v.beats)) for v in plan.env]),
        (
            "variables of the job",
            [
                ("passed", " ".join(plan.pass_env) or "none (pass_env in the recipe names them)"),
                *([("Slurm's task", " ".join(plan.world.task))] if plan.world.task else []),
                *([("left out", " ".join(plan.left_outside))] if plan.left_outside else []),
            ],
        ),
        (
            "binds",
            [
                (
                    b.path,
                    f"{'read-write' if b.write else 'read-only'}{'' if b.required else ' if it exists'}, {b.origin}",
                )
                for b in plan.binds
            ]
            if engines.get(plan.engine).image != "python"
            else [("none", "bare runs on the machine itself")],
        ),
        *([("annotations", [(name, value) for name, value in plan.annotations.items()])] if plan.annotations else []),
        *([("srun", [("", option) for option in srun_options(plan).splitlines()])] if srun_options(plan) else []),
        ("on each node", [("", " ".join(a if isinstance(a, Shell) else shlex.quote(a) for a in start_argv(plan)))]),
        ("which starts", [("in", plan.where), ("", shlex.join([*plan.launcher, *plan.command]))]),
    ]
    if "memory" in plan.reasons:
        estimate, *lines = plan.reasons["memory"].splitlines()
        rows.append((f"memory: {estimate}", [("", line) for line in lines]))
    if plan.findings:
        rows.append(("findings", [("", line) for finding in plan.findings for line in finding.line().splitlines()]))
    return "\n".join(_section(title, entries) for title, entries in rows)


def summary(plan: Plan) -> str:
    """The plan's most important lines, and its findings."""
    recipe, command = plan.recipe, plan.recipe.command
    about, _, figures = plan.reasons.get("memory", "").partition("\n")
    estimate = f"{about}; {' '.join(figures.split())}" if figures else about
    rows = [
        ("recipe", f"{recipe.name}" + (f": {recipe.about}" if recipe.about else "")),
        ("site", plan.reasons["site"]),
        ("image", _image(plan)),
        ("nodes", plan.reasons["nodes"]),
        ("ranks", f"{plan.world.size} in all; on each node {plan.reasons['ranks_per_node']}"),
        *([("batch", plan.reasons["batch"]), ("training", plan.reasons["training"])] if recipe.train else []),
        *([("memory", estimate)] if estimate else []),
        *([("command", f"{shlex.join(command.argv)} in {plan.where}")] if command else []),
        ("launcher", f"{recipe.launcher}, in {plan.engine}"),
        ("folder", plan.run_folder),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, *(finding.line() for finding in plan.findings)]) + "\n"


def _image(plan: Plan) -> str:
    return f"{plan.image} ({plan.reasons['image']}; started by {plan.engine})"


def _named(name: str, address: str) -> str:
    return name if name == address else f"{name} ({address})"


def _fabric(plan: Plan) -> list[tuple[str, str]]:
    fabric = plan.fabric
    whose = {"host": "the host's libraries", "image": "the image's libraries", "none": "nothing is added"}
    lines = [
        ("kind", f"{fabric.kind}, {whose[fabric.strategy]}: {' '.join(plan.reasons['fabric'].split())}"),
        *(("library", pattern) for pattern in fabric.libraries),
    ]
    if fabric.plugin:
        lines.append(("plugin", fabric.plugin))
    if plan.preflight and len(plan.world.nodes) > 1:
        proof = " or ".join(fabric.transport) or "any transport"
        least = fabric.min_bus_bandwidth_gb_s
        bandwidth = f", at {least} GB/s or more" if least else ""
        lines.append(("check", f"the preflight requires {proof} between nodes{bandwidth}"))
    return lines


def _origin(value: str, source: str, why: str, beats: tuple[str, ...]) -> str:
    shown = f"{value or repr(value)}  [{source}]"
    if why:
        shown += f" {why}"
    if beats:
        shown += f"; replaces {', '.join(beats)}"
    return shown


def _section(title: str, entries: list[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in entries), default=0)
    lines = [f"  {name:<{width}}  {value}".rstrip() if width else f"  {value}" for name, value in entries]
    return "\n".join([title, *lines, ""])
