"""The verbs as commands of typer, with their examples, and typer's errors as findings."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import typer
from pydantic import ValidationError
from typer.exceptions import TyperException

from dray.cli import WITH_COMMAND
from dray.contract import exit_codes
from dray.contract.findings import ConfigError

_OF_GROUP = 3  # how many examples the help of a group shows
# Before what pydantic says of a value, and after it.
_AROUND = re.compile(r"^(Input should be |Value error, .* is not )|, unable to parse.*$|\.$")


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
        name="dray", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    app.callback()(lambda: None)  # else typer drops the name of an only verb
    for verb in verbs:
        module = importlib.import_module(f"dray.cli.{verb}")
        group: typer.Typer | None = getattr(module, "app", None)
        if group is None:
            app.command(verb)(getattr(module, verb))
            _show_examples(app)
        else:
            app.add_typer(group, name=verb, epilog=_epilog(_show_examples(group)[:_OF_GROUP]))
    return typer.main.get_command(app)


def _show_examples(app: typer.Typer) -> list[str]:
    """Put the examples at the end of each verb's docstring below its options; the first one of each verb."""
    first = []
    for verb in app.registered_commands:
        text, _, last = inspect.cleandoc(inspect.getdoc(verb.callback) or "").rpartition("\n\n")
        if last.startswith("dray "):
            examples = last.splitlines()
            verb.help, verb.epilog = text, _epilog(examples)
            first.append(examples[0])
    return first


def _epilog(examples: list[str]) -> str:
    """Lines that typer must not join, which a backspace tells it."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in examples)])


def _error(wrong: TyperException) -> ConfigError:
    """The wrong option, argument or verb, what it takes, what was typed, and the help to read."""
    context: Any = getattr(wrong, "ctx", None)
    parameter: Any = getattr(wrong, "param", None)
    fix = f"{context.command_path} -h" if context else "dray -h"
    if parameter is None:
        text = wrong.format_message().rstrip(".")
        return ConfigError(text[:1].lower() + text[1:], fix=fix)
    option = parameter.param_type_name == "option"
    name = str(parameter.opts[0] if option else parameter.metavar or parameter.name)
    if not isinstance(wrong.__cause__, ValidationError):
        return ConfigError(f"{name} is missing", wanted=parameter.help, fix=fix)
    value = wrong.__cause__.errors(include_url=False)[0]
    wanted = _AROUND.sub("", value["msg"]).replace("a valid integer", "a whole number")
    wanted = wanted.replace("greater than or equal to", "at least")
    return ConfigError(f"{name} has a wrong value", wanted=wanted, found=value["input"], fix=fix)
