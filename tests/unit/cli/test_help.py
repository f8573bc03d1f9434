"""Each --help ends with an example that its verb takes."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys

import pytest

import verbs
from dray import cli
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.runs.prepare import read_recipe
from helpers import PYTHON, ROOT

VERBS = verbs.verbs()
EXAMPLES = [(path, line.strip()) for path, command in VERBS.items() for line in (command.epilog or "").splitlines()[2:]]


def test_every_help_ends_with_an_example() -> None:
    assert [path for path, command in VERBS.items() if not command.epilog and path != "dray"] == []
    assert {command.epilog.splitlines()[1] for command in VERBS.values() if command.epilog} == {"Example:", "Examples:"}
    assert [line for _, line in EXAMPLES if len(line) > 78] == []


def test_the_list_has_the_beginning_of_each_verb_s_help_in_one_line() -> None:
    assert len(cli.SHOWN) <= 24
    for verb, line in {**cli.SHOWN, **cli.HIDDEN}.items():
        if line:
            assert (VERBS[f"dray {verb}"].help or "").startswith(line), verb
    assert [line for line in cli._help().splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("verb", ["run", "submit", "plan"])
def test_sizes_have_the_limits_and_the_defaults_of_a_recipe(verb: str) -> None:
    options = {option.name: option for option in VERBS[f"dray {verb}"].params}
    for name, key in (("nodes", "nodes"), ("ranks", "ranks_per_node")):
        schema = Recipe.model_json_schema()["properties"][key]
        limits = schema.get("anyOf", [schema])[0]
        assert (options[name].min, options[name].max) == (limits["minimum"], limits["maximum"])
        assert "Default: the recipe's." in options[name].help
    assert "Default: " in options["gpus_per_node"].help


def test_help_and_version_import_no_verb() -> None:
    """Half of what `dray --help` took was the import of typer and rich."""
    code = "import sys; from dray import cli\ntry: cli.main()\nfinally: assert 'typer' not in sys.modules"
    for option in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", code, option], env=PYTHON, check=True, capture_output=True)


@pytest.mark.parametrize(("path", "example"), EXAMPLES, ids=lambda value: value)
def test_an_example_is_a_command_that_its_verb_takes(path: str, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(re.split(r" >", example)[0])
    assert words.pop(0) == "dray"
    command = verbs.parse(words)
    asked = VERBS[path]
    whose = [one.callback for one in verbs.verbs(asked).values()] if hasattr(asked, "commands") else [asked.callback]
    assert inspect.unwrap(command.callback) in map(inspect.unwrap, whose) or path == "dray"
    recipe = next((word for word in words if word.startswith("recipes/") and "mine" not in word), "")
    if recipe:
        settings = [word.split(",")[0] for word in words if re.match(r"[\w.]+=", word)]
        assert read_recipe(dray_home.root() / recipe, settings)
