"""Check the environment of a run's ranks against the rules of variables.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from dray import engines
from dray.config.image_definition import ACCELERATORS
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.planning.schema import Plan

Level = Literal["error", "warning"]
_SHELL = "your shell"
# How an adopted image finds dray: by a folder of packages for the image's own Python.
_ADOPTED = ("PYTHONPATH", "dray")


@cache
def rules() -> dict[str, list[dict[str, Any]]]:
    """The known variables, and the rules that come with dray for each."""
    content = tomllib.loads(resources.files("dray.fitness").joinpath("variables.toml").read_text(encoding="utf-8"))
    by_name: dict[str, list[dict[str, Any]]] = {name: [] for names in content["names"].values() for name in names}
    for rule in content["rules"]:
        by_name.setdefault(rule["name"], []).append(rule)
    return by_name


@cache
def _near() -> dict[str, str]:
    """The known names by themselves and by what is left without one letter: a typo is found without comparing it
    with all names."""
    return {form: name for name in rules() for form in _forms(name)}


def _forms(name: str) -> list[str]:
    return [name, *(name[:position] + name[position + 1 :] for position in range(len(name)))]


class Setting(NamedTuple):
    """A variable, and who sets it."""

    name: str
    value: str
    source: str


def check(plan: Plan, shell: Mapping[str, str]) -> list[Finding]:
    """Findings on the environment of this plan's ranks, and on misspelt variables of the shell."""
    settings = [Setting(variable.name, variable.value, variable.source) for variable in plan.env]
    settings += [Setting(name, shell[name], f"{_SHELL}, by pass_env") for name in plan.pass_env if name in shell]
    inside = {setting.name: setting for setting in settings}  # the last one wins
    outside = {name: Setting(name, value, _SHELL) for name, value in shell.items() if name not in inside}
    found: list[Finding] = []
    for setting in inside.values():
        found += _typo(setting, "error")
        if (setting.name, setting.source) != _ADOPTED:
            found += _by_rules(plan, inside, setting)
    isolated = engines.get(plan.engine).isolates_env
    for setting in outside.values():
        found += _typo(setting, "warning")
        if not isolated:
            found += _by_rules(plan, {**inside, **outside}, setting)
    return sorted(found, key=lambda finding: (-finding.code, finding.problem))


def warnings(plan: Plan, shell: Mapping[str, str]) -> list[Finding]:
    """The findings, shown when a run starts; none of them stops it."""
    return [finding._replace(code=exit_codes.DONE) for finding in check(plan, shell)]


def _finding(setting: Setting, level: Level, found: str, *, fix: str = "", source: str = "") -> Finding:
    # Any value of the shell's may be a secret, and users paste what is printed into tickets.
    value = "(set)" if setting.source.startswith(_SHELL) else setting.value
    finding = Finding(f"{setting.name}={value}", where=setting.source, found=found, fix=fix, source=source)
    return finding._replace(code=exit_codes.CONFIG) if level == "error" else finding._replace(kind=level)


def _by_rules(plan: Plan, names: Collection[str], setting: Setting) -> Iterator[Finding]:
    """The rules that apply to this setting, with these other names and the plan's GPUs, nodes and sbatch options."""
    accelerator, nodes = ACCELERATORS[plan.variant], "several" if len(plan.world.nodes) > 1 else "one"
    for rule in rules().get(setting.name, ()):
        applies = (
            re.fullmatch(rule.get("value", ".*"), setting.value, re.IGNORECASE | re.DOTALL)
            and rule.get("accelerator", accelerator) == accelerator
            and rule.get("nodes", nodes) == nodes
            and rule.get("unless_option") not in plan.sbatch
            and rule.get("also", setting.name) in names
            and rule.get("unless") not in names
        )
        if applies:
            source = f"{rule['source']}, {rule['date']}"
            yield _finding(setting, rule["level"], rule["problem"], fix=rule["fix"], source=source)


def _correct(name: str) -> str | None:
    """The known name that differs by one letter: one more, one less, another one, or two swapped."""
    if name in rules():
        return None
    return next((_near()[form] for form in _forms(name) if form in _near()), None)


def _typo(setting: Setting, level: Level) -> Iterator[Finding]:
    correct = _correct(setting.name)
    if correct:
        yield _finding(setting, level, f"nothing reads it; did you mean {correct}?", fix=f"write {correct}")
