"""The command line of dray as a tree of verbs: what a command names, and whether its verb takes it."""

from __future__ import annotations

from typing import Any

from dray import cli
from dray.cli import app

TREE = app.command(*cli.SHOWN, "cluster", "completion")


def verbs(command: Any = TREE, path: str = "dray") -> dict[str, Any]:
    """Each verb by its whole name."""
    found = {path: command}
    for name, inner in getattr(command, "commands", {}).items():
        found |= verbs(inner, f"{path} {name}")
    return found


def named(argv: list[str]) -> tuple[Any, list[str]]:
    """The verb that these words after `dray` name, and the words that are left for it."""
    command, rest = TREE, argv[: argv.index("--")] if argv[0] in cli.WITH_COMMAND and "--" in argv else list(argv)
    while hasattr(command, "commands") and rest:
        name = rest.pop(0)
        assert name in command.commands, f"dray has no verb {name}"
        command = command.commands[name]
    return command, rest


def parse(argv: list[str]) -> Any:
    """The verb, once it has taken all words; click's error where it does not."""
    command, rest = named(argv)
    command.make_context(argv[0], rest, parent=TREE.make_context("dray", [], resilient_parsing=True))
    return command
