"""The verbs as commands of typer, with their examples, and typer's errors as findings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import ValidationError
from typer.exceptions import TyperException

from dray.cli import HIDDEN, SHOWN, WITH_COMMAND
from dray.contract import exit_codes
from dray.contract.findings import ConfigError

_PARAMETER = re.compile(r"^(--[\w-]+|[A-Z]+)(?:, (-\w))?(?: ([^\s:]+))?: (.*(?:\n +.*)*)\n?", re.MULTILINE)
_FILES = {
    "init": "recipe", "data": "recipe", "doctor": "site", "plan": "run", "submit": "run",
    "status": "runs", "top": "runs", "logs": "runs", "watch": "runs", "stop": "runs", "enter": "runs", "clean": "runs",
    "why": "report", "diff": "report", "replay": "report", "finish": "report",
}  # fmt: skip
"""The file of each verb that has none of its own name."""
_OF_GROUP = 3  # how many examples the help of a group shows


def run(argv: list[str]) -> int:
    """Run the verb argv[0]; its exit code. What typer refuses is a ConfigError."""
    cut = argv.index("--") if argv[0] in WITH_COMMAND and "--" in argv else len(argv)
    try:
        ended = command(argv[0])(argv[:cut], prog_name="dray", obj=argv[cut + 1 :], standalone_mode=False)
        return int(ended or exit_codes.DONE)
    except TyperException as wrong:
        message = wrong.format_message()
        if message.startswith("Usage:"):  # only a group was typed
            print(message)
            return exit_codes.CONFIG
        raise _error(wrong) from wrong
    except typer.Abort:  # Ctrl-C that no verb has handled
        return 130


def command(*verbs: str) -> Any:  # noqa: ANN401  typer has no name for its commands
    """dray with these verbs."""
    app = typer.Typer(
        name="dray",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # else typer drops the name of an only verb
    for verb in verbs:
        module = importlib.import_module(f"dray.cli.{_FILES.get(verb, verb)}")
        group: typer.Typer | None = getattr(module, f"{verb}_verbs", None)
        if group is None:
            app.command(verb)(getattr(module, verb))
            continue
        examples = []
        for inner in group.registered_commands:
            examples += _document(inner)[:1]
        about = f"{(SHOWN | HIDDEN)[verb]}."
        app.add_typer(group, name=verb, help=about, no_args_is_help=True, epilog=_epilog(examples[:_OF_GROUP]))
    for info in app.registered_commands:
        _document(info)
    return typer.main.get_command(app)


def _document(verb: typer.models.CommandInfo) -> list[str]:
    """Show the examples of a verb's docstring below its options; return them."""
    verb.help, examples = _read(verb.callback)
    verb.short_help = verb.help.partition("\n")[0]  # else typer cuts it
    verb.epilog = _epilog(examples)
    return examples


@cache
def _read(verb: Callable[..., Any]) -> tuple[str, list[str]]:
    """The text of a docstring and the examples at its end. Parameters get the lines that the docstring has for them,
    such as `--to FOLDER: Folder to write.`, `--follow, -f: Follow it.` or `SOURCE: A SIF.`"""
    if verb.__doc__ is None:
        raise ConfigError("python -OO drops the docstrings, in which dray has its options", fix="unset PYTHONOPTIMIZE")
    text, _, last = inspect.cleandoc(verb.__doc__).rpartition("\n\n")
    examples = last.splitlines()
    if not last.startswith("dray "):
        text, examples = f"{text}\n\n{last}", []
    types = get_type_hints(verb, include_extras=True)
    for name, short, value, about in _PARAMETER.findall(text):
        parameter = name.strip("-").lower().replace("-", "_")
        line = " ".join(about.split())
        info = typer.Argument(metavar=name, help=line)
        if name.startswith("--"):
            info = typer.Option(name, *filter(None, [short]), metavar=value or None, help=line)
        types[parameter] = Annotated[types[parameter], info]
    verb.__annotations__ = types
    return _PARAMETER.sub("", text).strip(), examples


def _epilog(examples: list[str]) -> str | None:
    """Lines that typer must not join, which a backspace tells it."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in examples)]) if examples else None


def _error(wrong: TyperException) -> ConfigError:
    """What typer says, what was typed, and the help to read."""
    context: Any = getattr(wrong, "ctx", None)
    parameter: Any = getattr(wrong, "param", None)
    text = wrong.format_message().rstrip(".").replace("Value error, ", "")
    text = text[:1].lower() + text[1:]
    fix = f"{context.command_path} -h" if context else "dray -h"
    value = wrong.__cause__
    if isinstance(value, ValidationError):
        return ConfigError(text, found=value.errors(include_url=False)[0]["input"], fix=fix)
    return ConfigError(text, wanted=getattr(parameter, "help", ""), fix=fix)
