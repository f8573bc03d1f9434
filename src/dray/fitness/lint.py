"""Hold an environment against what is known of its variables: who set each, and which will hurt."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from dray.config.image import ACCELERATORS
from dray.planning.environment import Variable
from dray.planning.plan import Plan

Verdict = Literal["error", "warning", "note"]
_SHELL = "your shell"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is to be said of one variable."""

    name: str
    value: str
    set_by: str
    verdict: Verdict
    says: str
    fix: str = ""
    source: str = ""


@dataclass(frozen=True)
class Rules:
    """environment.toml, ready to be asked."""

    names: frozenset[str]
    near: Mapping[str, str]
    """Every known name with one letter less, so that a slip of one letter is found without comparing with all."""
    rules: Mapping[str, Sequence[Mapping[str, Any]]]


@cache
def rules() -> Rules:
    """The rules that come with dray."""
    said = tomllib.loads(resources.files("dray.fitness").joinpath("environment.toml").read_text(encoding="utf-8"))
    names = [name for group in said["names"].values() for name in group]
    near = {shorter: name for name in names for shorter in _shorter(name)}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for rule in said["rules"]:
        by_name.setdefault(rule["name"], []).append(rule)
    return Rules(frozenset(names) | by_name.keys(), near, by_name)


def _shorter(name: str) -> list[str]:
    return [name[:at] + name[at + 1 :] for at in range(len(name))]


def check(plan: Plan, shell: Mapping[str, str], image: Mapping[str, str]) -> list[Finding]:
    """The environment that this plan's ranks get, and what of the shell's stays outside or is beaten."""
    known = rules()
    inside = {name: (value, "image") for name, value in image.items()}
    inside |= {variable.name: (variable.value, variable.source) for variable in plan.env}
    inside |= {name: (shell[name], f"{_SHELL}, by pass_env") for name in plan.pass_env if name in shell}
    found: list[Finding] = []
    for name, (value, set_by) in inside.items():
        found += _of_rules(plan, inside.keys(), name, value, set_by)
        found += _misspelt(name, value, set_by, "error")
    for variable in plan.env:
        found += _shadowed(variable, shell)
    passes = plan.engine in ("bare", "pyxis")
    for name, value in shell.items():
        if name in inside:
            continue
        found += _misspelt(name, value, _SHELL, "warning")
        if passes:
            found += _of_rules(plan, {*inside, *shell}, name, value, _SHELL)
        elif name in known.names:
            says = f"stays outside: {plan.engine} hands in only what the plan names"
            fix = f'env.{name}=... in the recipe, or pass_env=["{name}"]'
            found.append(Finding(name=name, value=value, set_by=_SHELL, verdict="note", says=says, fix=fix))
    order = ("error", "warning", "note")
    # A shell's value may be a secret whatever its name is, and what is printed ends up in tickets.
    shown = [replace(one, value="(set)") if one.set_by.startswith(_SHELL) else one for one in found]
    return sorted(shown, key=lambda one: (order.index(one.verdict), one.name))


def aloud(plan: Plan, shell: Mapping[str, str]) -> str:
    """What a user must hear before the run, a line each; notes are for those who ask."""
    urgent = [one for one in check(plan, shell, {}) if one.verdict != "note"]
    return "".join(f"dray: {one.verdict}: {one.name}={one.value} ({one.set_by}): {one.says}\n" for one in urgent)


def _of_rules(plan: Plan, names: Collection[str], name: str, value: str, set_by: str) -> Iterator[Finding]:
    """What is known of it beside these other names, on this plan's GPUs and nodes, with its sbatch options."""
    accelerator, nodes = ACCELERATORS[plan.variant], "several" if len(plan.world.nodes) > 1 else "one"
    for rule in rules().rules.get(name, ()):
        if not re.fullmatch(rule.get("value", ".*"), value, re.IGNORECASE | re.DOTALL):
            continue
        if rule.get("accelerator", accelerator) != accelerator:
            continue
        if rule.get("nodes", nodes) != nodes:
            continue
        if rule.get("unless_option") in plan.sbatch:
            continue
        if ("also" in rule and rule["also"] not in names) or rule.get("unless") in names:
            continue
        source = f"{rule['source']}, {rule['date']}"
        yield Finding(
            name=name, value=value, set_by=set_by, verdict=rule["verdict"], says=rule["says"], fix=rule["fix"],
            source=source,
        )  # fmt: skip


def _slip(name: str) -> str | None:
    """The known name that this one is a slip of one letter away from: one more, one less, one other, or two swapped."""
    known = rules()
    if name in known.names:
        return None
    if name in known.near:
        return known.near[name]
    for shorter in _shorter(name):
        if shorter in known.names:
            return shorter
        near = known.near.get(shorter)
        if near and len(near) == len(name):
            return near
    return None


def _misspelt(name: str, value: str, set_by: str, verdict: Verdict) -> Iterator[Finding]:
    right = _slip(name)
    if right:
        says = f"nothing reads it; {right} is the name"
        yield Finding(name=name, value=value, set_by=set_by, verdict=verdict, says=says, fix=f"write {right}")


def _shadowed(variable: Variable, shell: Mapping[str, str]) -> Iterator[Finding]:
    others = list(variable.beats)
    if variable.name in shell and shell[variable.name] != variable.value:
        others.append(f"that of {_SHELL}")
    if others:
        says = f"beats {', '.join(others)}"
        yield Finding(name=variable.name, value=variable.value, set_by=variable.source, verdict="note", says=says)
