"""Check the environment of a run's ranks against the rules of variables.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from dray import engines
from dray.config.image_definition import ACCELERATORS
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.planning.schema import Plan, Variable

Level = Literal["error", "warning", "note"]
_SHELL = "your shell"
_LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Rules:
    """variables.toml, indexed by name."""

    names: frozenset[str]
    near: Mapping[str, str]
    """Every known name, and with one letter removed: a typo is found without comparing it with all names."""
    rules: Mapping[str, Sequence[Mapping[str, Any]]]


@cache
def rules() -> Rules:
    """The rules that come with dray."""
    content = tomllib.loads(resources.files("dray.fitness").joinpath("variables.toml").read_text(encoding="utf-8"))
    names = [name for group in content["names"].values() for name in group]
    near = {shorter: name for name in names for shorter in _shorter(name)} | {name: name for name in names}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for rule in content["rules"]:
        by_name.setdefault(rule["name"], []).append(rule)
    return Rules(frozenset(names) | by_name.keys(), near, by_name)


def _shorter(name: str) -> list[str]:
    return [name[:at] + name[at + 1 :] for at in range(len(name))]


class Setting(NamedTuple):
    """A variable, and who sets it."""

    name: str
    value: str
    source: str


# How an adopted image finds dray: by a folder of packages for the image's own Python.
_ADOPTED = ("PYTHONPATH", "dray")


def check(plan: Plan, shell: Mapping[str, str], image: Mapping[str, str]) -> list[Finding]:
    """Findings on the environment of this plan's ranks, and on the shell's variables that stay outside."""
    settings = [Setting(name, value, "image") for name, value in image.items()]
    settings += [Setting(variable.name, variable.value, variable.source) for variable in plan.env]
    settings += [Setting(name, shell[name], f"{_SHELL}, by pass_env") for name in plan.pass_env if name in shell]
    inside = {setting.name: setting for setting in settings}  # the last one wins
    found: list[Finding] = []
    for setting in inside.values():
        if (setting.name, setting.source) != _ADOPTED:
            found += _by_rules(plan, inside.keys(), setting)
        found += _typo(setting, "error")
    for variable in plan.env:
        found += _overridden(variable, shell)
    shares_environment = not engines.get(plan.engine).isolates_env
    for name, value in shell.items():
        if name in inside:
            continue
        setting = Setting(name, value, _SHELL)
        found += _typo(setting, "warning")
        if shares_environment:
            found += _by_rules(plan, {*inside, *shell}, setting)
        elif name in rules().names:
            problem = f"not passed: {plan.engine} passes only the plan's variables"
            found.append(_finding(setting, "note", problem, fix=f'env.{name}=... or pass_env=["{name}"]'))
    return sorted(found, key=lambda one: (_LEVELS.index(one.level), one.problem))


def warnings(plan: Plan, shell: Mapping[str, str]) -> list[Finding]:
    """Errors and warnings, shown when a run starts; none of them stops it."""
    return [one._replace(code=exit_codes.DONE) for one in check(plan, shell, {}) if one.level != "note"]


def _finding(setting: Setting, level: Level, found: str, *, fix: str = "", source: str = "") -> Finding:
    # Any value of the shell's may be a secret, and users paste what is printed into tickets.
    value = "(set)" if setting.source.startswith(_SHELL) else setting.value
    about = Finding(f"{setting.name}={value}", where=setting.source, found=found, fix=fix, source=source)
    return about._replace(code=exit_codes.CONFIG) if level == "error" else about._replace(kind=level)


def _by_rules(plan: Plan, names: Collection[str], setting: Setting) -> Iterator[Finding]:
    """The rules that apply to this setting, with these other names and the plan's GPUs, nodes and sbatch options."""
    accelerator, nodes = ACCELERATORS[plan.variant], "several" if len(plan.world.nodes) > 1 else "one"
    for rule in rules().rules.get(setting.name, ()):
        if not re.fullmatch(rule.get("value", ".*"), setting.value, re.IGNORECASE | re.DOTALL):
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
        yield _finding(setting, rule["level"], rule["problem"], fix=rule["fix"], source=source)


def _correct(name: str) -> str | None:
    """The known name that differs by one letter: one more, one less, another one, or two swapped."""
    known = rules()
    if name in known.names:
        return None
    return next((known.near[form] for form in (name, *_shorter(name)) if form in known.near), None)


def _typo(setting: Setting, level: Level) -> Iterator[Finding]:
    correct = _correct(setting.name)
    if correct:
        yield _finding(setting, level, f"nothing reads it; did you mean {correct}?", fix=f"write {correct}")


def _overridden(variable: Variable, shell: Mapping[str, str]) -> Iterator[Finding]:
    others = list(variable.beats)
    if variable.name in shell and shell[variable.name] != variable.value:
        others.append(f"the value in {_SHELL}")
    if others:
        setting = Setting(variable.name, variable.value, variable.source)
        yield _finding(setting, "note", f"overrides {', '.join(others)}")
