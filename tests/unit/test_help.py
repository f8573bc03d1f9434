"""Each --help ends with an example that its verb takes."""

from __future__ import annotations

import inspect
import re
import shlex
from typing import Any

import pytest
import typer

from dray import cli
from dray.config import checkout
from dray.runs.write import read_recipe
from helpers import ROOT


def _tree() -> Any:
    """All verbs, as a new process has them."""
    shared, cli.app = cli.app, typer.Typer(epilog=cli.app.info.epilog, callback=cli._version)
    try:
        cli._register(None)
        return typer.main.get_command(cli.app)
    finally:
        cli.app = shared


TREE = _tree()


def _verbs(command: Any = TREE, path: str = "dray") -> dict[str, Any]:
    found = {path: command}
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            found |= _verbs(inner, f"{path} {name}")
    return found


VERBS = _verbs()
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
    words = words[: words.index("--")] if words[0] in cli._START and "--" in words else words
    context = TREE.make_context("dray", [], resilient_parsing=True)
    command = TREE
    while hasattr(command, "commands"):
        name = words.pop(0)
        command = command.commands[name]
    command.make_context(name, list(words), parent=context)
    asked = VERBS[path]
    whose = [one.callback for one in _verbs(asked).values()] if hasattr(asked, "commands") else [asked.callback]
    assert inspect.unwrap(command.callback) in map(inspect.unwrap, whose) or path == "dray"
    recipe = next((word for word in words if word.startswith("recipes/") and "mine" not in word), "")
    if recipe:
        settings = [word.split(",")[0] for word in words if re.match(r"[\w.]+=", word)]
        assert read_recipe(checkout.root() / recipe, settings)


def test_the_text_of_a_docstring_and_its_examples_are_apart() -> None:
    from dray.cli.examples import split

    assert split("Show it.\n\n    dray why\n    dray why 4711\n    ") == ("Show it.", ["dray why", "dray why 4711"])
    assert split("Show it.") == ("Show it.", [])
    assert split("dray is a tool.\nIt runs.") == ("dray is a tool.\nIt runs.", [])
