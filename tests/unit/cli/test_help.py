"""Each --help ends with an example that its verb takes."""

from __future__ import annotations

import inspect
import re
import shlex

import pytest

import verbs
from dray.config import dray_home
from dray.runs.prepare import read_recipe
from helpers import ROOT

VERBS = verbs.verbs()
EXAMPLES = [
    (path, line.strip().replace(r"\[", "["))
    for path, command in VERBS.items()
    for line in (command.epilog or "").splitlines()[1:]
]


def test_every_help_ends_with_an_example() -> None:
    assert [path for path, command in VERBS.items() if not command.epilog] == []
    assert {command.epilog.splitlines()[0] for command in VERBS.values()} == {"Example:", "Examples:"}
    assert [line for _, line in EXAMPLES if len(line) > 78] == []


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


def test_the_text_of_a_docstring_and_its_examples_are_apart() -> None:
    from dray.cli.examples import split

    assert split("Show it.\n\n    dray why\n    dray why 4711\n    ") == ("Show it.", ["dray why", "dray why 4711"])
    assert split("Show it.") == ("Show it.", [])
    assert split("dray is a tool.\nIt runs.") == ("dray is a tool.\nIt runs.", [])
