"""The examples at the end of each --help: the last lines of a verb's docstring, if they begin with `dray `."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import typer

_OF_GROUP = 3  # how many examples the help of a group shows


def split(doc: str) -> tuple[str, list[str]]:
    """The text of a docstring, and its examples."""
    *text, last = inspect.cleandoc(doc).split("\n\n")
    examples = last.splitlines()
    return ("\n\n".join(text), examples) if all(map(_is_example, examples)) else (f"{doc}", [])


def show(app: typer.Typer) -> None:
    """Put each verb's examples below its options, and some of them below a group's verbs."""
    for verb in app.registered_commands:
        if verb.callback and not verb.epilog:
            verb.help, examples = split(verb.help or verb.callback.__doc__ or "")
            verb.epilog = _epilog(examples)
    for group in app.registered_groups:
        if group.typer_instance:
            show(group.typer_instance)
            group.epilog = _epilog(list(_first(group.typer_instance))[:_OF_GROUP])


def _first(group: typer.Typer) -> Iterator[str]:
    """One example of each verb."""
    verbs: list[Callable[..., Any] | None] = [verb.callback for verb in group.registered_commands]
    for verb in verbs:
        yield from split((verb and verb.__doc__) or "")[1][:1]


def _epilog(examples: list[str]) -> str | None:
    """Typer reads [] as markup."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    return "\n".join([title, *(f"  {line}".replace("[", r"\[") for line in examples)]) if examples else None


def _is_example(line: str) -> bool:
    return line.startswith("dray ")
